"""Files are written completely or not at all, and only to their intended place."""

import os
import stat
from pathlib import Path

import pytest
import yaml

import rbm
from rbm.utils.files import (
    append_csv,
    parse_own_yaml,
    parse_yaml,
    read_csv,
    read_json,
    read_yaml,
    same_file,
    write_atomically,
)


def test_a_folder_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder, expected the name of a file"):
        write_atomically(tmp_path, lambda partial: pytest.fail("began to write"))
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_missing_file(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"^configuration file .* is a folder, expected a file$"):
        read_yaml("configuration file", tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_what_cannot_be_read_twice_is_no_missing_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", os.devnull):
        with pytest.raises(ValueError, match=r"^experiment file .* is a pipe or a device, expected a file; write its"):
            read_yaml("experiment file", path)


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "out.csv.partial").symlink_to(victim)
    write_atomically(tmp_path / "out.csv", lambda partial: partial.write_text("new"))
    assert victim.read_text() == "mine"
    assert (tmp_path / "out.csv").read_text() == "new"


@pytest.mark.parametrize("mode", [0o640, None], ids=["of the file before", "of a new file"])
def test_permissions(tmp_path, mode):
    file, usual = tmp_path / "out.csv", tmp_path / "usual"
    usual.write_text("")
    if mode is not None:
        file.write_text("old")
        os.chmod(file, mode)
    write_atomically(file, lambda partial: partial.write_text("new"))
    assert stat.S_IMODE(file.stat().st_mode) == (mode or stat.S_IMODE(usual.stat().st_mode))


@pytest.mark.parametrize("failing", ["write", "rename"])
def test_a_failure_leaves_nothing(tmp_path, monkeypatch, failing):
    def write(partial):
        partial.write_text("half")
        if failing == "write":
            raise KeyboardInterrupt

    def fail(*_):
        raise OSError("disk full")

    if failing == "rename":
        monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((KeyboardInterrupt, OSError)):
        write_atomically(tmp_path / "out.csv", write)
    assert not list(tmp_path.iterdir())


def test_a_file_is_flushed_by_a_descriptor_that_may_write(tmp_path, monkeypatch):
    """On Windows, ``os.fsync`` fails for any other."""
    fcntl = pytest.importorskip("fcntl")
    modes = []
    monkeypatch.setattr(os, "fsync", lambda file: modes.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE))
    write_atomically(tmp_path / "out.csv", lambda partial: partial.write_text("new"))
    assert modes == [os.O_RDWR]
    assert (tmp_path / "out.csv").read_text() == "new"


def test_rows_are_added_under_one_header(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    assert read_csv(path, missing_ok=True) == []
    with pytest.raises(FileNotFoundError, match=r"rows\.csv does not exist"):
        read_csv(path)
    append_csv(path, [{"name": "a, b\nc", "count": 1}])
    append_csv(path, [{"count": 2, "name": "d"}, {"count": 3, "name": "e"}], ("name", "count"))
    assert path.read_bytes().startswith(b"name,count\n")
    assert [tuple(row.values()) for row in read_csv(path)] == [("a, b\nc", "1"), ("d", "2"), ("e", "3")]
    (tmp_path / "empty.csv").touch()
    append_csv(tmp_path / "empty.csv", [{"name": "a"}])
    assert read_csv(tmp_path / "empty.csv") == [{"name": "a"}]


def test_same_file(tmp_path):
    first, link, copy = tmp_path / "first", tmp_path / "link", tmp_path / "copy"
    first.write_text("a")
    copy.write_text("a")
    os.link(first, link)
    assert same_file(first, link)
    assert not same_file(first, copy)
    assert same_file(tmp_path / "new", tmp_path / "x" / ".." / "new")


LAUGHS = "a0: &a0 [1, 1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}, *a{i}, *a{i}]\n" for i in range(20))
NO_YAML = {
    "nested": ("[" * 50_000, "nested too deeply"),
    "aliases": (LAUGHS, "expands to more than 65,536 values"),
    "circle": ("a: &a [*a]", "an alias refers to the value that contains it"),
    "date": ("a: 2024-13-45", "month must be in"),
    "number": ("a: " + "9" * 5000, "not valid YAML: it has a whole number of thousands of digits$"),
    "tag": ("a: !!int ''", "not valid YAML"),
    "code": ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "latin": ("a: \xe9", "is not text in UTF-8"),
    "large": ("a: " + "x" * 2**23, "bytes, expected at most"),
    "twice": ("a: {lr: 1}\nb: 2\na: {decay: 1}", "the key a is in line 1 and again in line 3; keep one of them"),
    "twice below": ("a:\n  lr: 1\n  lr: 2", "the key lr is in line 2 and again in line 3"),
    "twice in two spellings": ("yes: 1\ntrue: 2", "the key yes is in line 1 and again in line 2 as true, which is the"),
    "control": ("a: \x00", "special characters are not allowed"),
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": ' + "9" * 5000 + "}", "is not valid JSON: it has a whole number of thousands of digits"),
        ('{"a": ', "is not valid JSON: Expecting value"),
        ("[" * 200_000, "is nested too deeply"),
        ("[1]", "holds list, expected names and values"),
        ("\xe9", "is not text in UTF-8"),
    ],
)
def test_json_that_is_none(tmp_path, text, message):
    (tmp_path / "own.json").write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=f"^settings .*own.json {message}"):
        read_json(tmp_path / "own.json", "settings")


@pytest.mark.parametrize("name", NO_YAML)
def test_yaml_that_is_none(tmp_path, name):
    text, message = NO_YAML[name]
    (tmp_path / "own.yaml").write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=f"settings .*own.yaml .*{message}"):
        read_yaml("settings", tmp_path / "own.yaml")


@pytest.mark.parametrize("text", ["", "# seeds: 0-4\n", "---\n"])
def test_a_yaml_file_without_content(tmp_path, text):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"^settings .*own.yaml is empty or has comments alone$"):
        read_yaml("settings", tmp_path / "own.yaml")


def test_aliases_that_stand_for_little_are_taken(tmp_path):
    (tmp_path / "own.yaml").write_text("a: &a {lr: 1}\nb: *a\nc: {<<: *a, decay: 2}\n")
    assert read_yaml("settings", tmp_path / "own.yaml")["c"] == {"lr": 1, "decay": 2}


def test_rows_are_utf8_in_every_locale(tmp_path, monkeypatch):
    plain = open
    monkeypatch.setattr("builtins.open", lambda *args, **options: plain(*args, **{"encoding": "ascii", **options}))
    append_csv(tmp_path / "rows.csv", [{"dataset": "straßen.npz"}])
    assert read_csv(tmp_path / "rows.csv") == [{"dataset": "straßen.npz"}]


@pytest.mark.parametrize("with_libyaml", [True, False])
def test_the_packages_own_yaml_is_read_alike_with_and_without_libyaml(monkeypatch, with_libyaml):
    files = sorted((Path(rbm.__file__).parent / "config" / "configs").rglob("*.yaml"))
    assert files
    if not with_libyaml:
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    for file in files:
        text = file.read_text()
        assert parse_own_yaml(text) == parse_yaml(text), file
