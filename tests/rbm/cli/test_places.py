"""Outputs that cannot be written: told before any work, with the option and a remedy."""

import os

import pytest

FEW = ("--set=teacher.max_epochs=2", "--set=mlp.max_epochs=2", "--set=encoding.deepwalk=false")
DISTILL = ("distill", *FEW, "--method", "mlp", "--no-plots")
TUNE = ("tune", *FEW, "--method", "mlp", "--trials", "1", "--seeds", "0")
COMPLEXITY = ("reproduce", "complexity", "--datasets", "digits")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory, with a file and a link to nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nothing")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*DISTILL, "--out", "file"), "run folder file is a file; use another --out"),
        (("distill", "--resume", "--out", "file"), "run folder file is a file; use another --out"),
        ((*DISTILL, "--out", "file/run"), "run folder file/run: {}/file is a file, expected a folder; name another"),
        ((*DISTILL, "--out", "link"), "run folder link: link is a link to nothing, expected a folder; name another"),
        ((*DISTILL, "--cache", "file/c"), "cache file/c: {}/file is a file, expected a folder; name another"),
        (
            (*DISTILL, "--seeds", "0", "--out", "file/rows.csv"),
            "results file file/rows.csv: file is a file, expected a folder; name another",
        ),
        ((*TUNE, "--out", "file/t"), "search folder file/t: {}/file is a file, expected a folder; name another"),
        ((*COMPLEXITY, "--out", "file"), "out is file, expected an ending, such as file.csv: tables go into a folder"),
        (
            (*COMPLEXITY, "--out", "file.csv"),
            "folder of the study file: file is a file, expected a folder; name another",
        ),
        (
            ("reproduce", "main", "--datasets", "digits", "--out", "file.csv"),
            "folder of tables file: file is a file, expected a folder; name another",
        ),
        (("table", "."), "results file . is a folder; rbm experiment writes one"),
        (("report", "file"), "file is a file; expected the run folder of a finished rbm distill"),
    ],
)
def test_a_file_where_a_folder_is_expected(command, place, arguments, message):
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert message.format(place) in err
    assert (place / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*DISTILL, "--cache", "shut/c", "--out", "run"), "cache shut/c: no permission to write to {}/shut; name"),
        ((*DISTILL, "--seeds", "0", "--out", "shut/rows.csv"), "results file shut/rows.csv: no permission to write to"),
        ((*DISTILL, "--seeds", "0", "--out", "rows.csv"), "results file rows.csv: no permission to write to it; give"),
        ((*TUNE, "--out", "shut/t"), "search folder shut/t: no permission to write to {}/shut; give another folder"),
        (("report", "shut", "--out", "page.html"), "run: shut: no permission to write to shut; report a copy of it"),
    ],
)
def test_no_permission(command, place, monkeypatch, arguments, message):
    (place / "shut").mkdir()
    (place / "rows.csv").touch()
    monkeypatch.setattr("os.access", lambda path, mode: mode == os.R_OK or path.name not in ("shut", "rows.csv"))
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert message.format(place) in err


def test_a_file_without_permission_is_named_with_a_remedy(command, place, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", "run/student.json")

    monkeypatch.setattr("rbm.serving.prediction.predict_file", refused)
    assert command("predict", "run", "x.npy") == (
        2,
        "",
        "Error: no permission for run/student.json; allow it, or name another",
    )
