"""Two processes at once: one works, and the other is told which process to wait for."""

import os
import signal
import subprocess
import sys

import pytest

from rbm.config import Config
from rbm.training.run_files import begin_list, list_file, listed_files
from rbm.training.run_folder import RunFolder, open_run
from rbm.utils.locks import is_free, only_process, remove_abandoned

HOLDER = """
import sys, time
from pathlib import Path
from rbm.utils.locks import only_process
with only_process(Path(sys.argv[1]), "a folder", "wait"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds ``tmp_path / .x.lock``."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / ".x.lock")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_process_is_told_of_the_first_until_that_is_killed(holder, tmp_path):
    for _ in range(2):  # a refused attempt leaves the holder's process id in place
        with (
            pytest.raises(BlockingIOError, match=f"^a folder is in use by process {holder.pid}; wait$"),
            only_process(tmp_path / ".x.lock", "a folder", "wait"),
        ):
            pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with only_process(tmp_path / ".x.lock", "a folder", "wait"):
        pass
    assert is_free(tmp_path), "a lock that nothing holds does not fill a folder"


def test_the_first_process_is_known_as_soon_as_it_has_said_so(holder, tmp_path, monkeypatch):
    """Regression test: of two processes that started at once, the second said "in use by process (unknown)"."""
    owner = tmp_path / ".x.lock.pid"
    written = owner.read_bytes()
    owner.unlink()
    monkeypatch.setattr("rbm.utils.locks.time.sleep", lambda _: owner.write_bytes(written))
    with (
        pytest.raises(BlockingIOError, match=f"in use by process {holder.pid};"),
        only_process(tmp_path / ".x.lock", "a folder", "wait"),
    ):
        pass


def test_a_lock_of_another_user_is_named(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", str(tmp_path / ".x.lock"))

    monkeypatch.setattr("rbm.utils.locks.FileLock.acquire", refused)
    with (
        pytest.raises(PermissionError, match=r"^a folder: no permission to open its lock .*\.x\.lock; remove"),
        only_process(tmp_path / ".x.lock", "a folder", "wait"),
    ):
        pass


WRITER = """
import sys, time
from pathlib import Path
from rbm.utils.locks import locked_partial
with locked_partial(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_only_what_killed_processes_left_is_removed(tmp_path):
    out = tmp_path / "out[1].csv"
    partial, other = (tmp_path / f".{name}-{'0a' * 8}.partial" for name in (out.name, f"{out.name}-b.csv"))
    other.write_text("of a file whose name begins alike")
    with subprocess.Popen([sys.executable, "-c", WRITER, str(partial)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "held\n"
        remove_abandoned(out)
        assert partial.exists(), "it is being written"
        writer.kill()
    partial.with_name(partial.name.replace("0a" * 8, "0b" * 8)).symlink_to(other)
    remove_abandoned(out)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {other.name, partial.name.replace("0a" * 8, "0b" * 8)}, "links are not ours"


@pytest.mark.parametrize("how", ["--overwrite", "--resume"])
def test_a_run_at_work_is_neither_overwritten_nor_resumed(command, tmp_path, how):
    folder = tmp_path / "run"
    quick = ["--set", "teacher.max_epochs=1", "--set", "rbm.max_epochs=20", "--method", "rbm", "--no-plots"]
    with open_run(folder, Config()) as run:
        run.write_text("summary.json", "{}")
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        status, _, err = command("distill", *(quick if how == "--overwrite" else []), "--out", folder, how)
        assert status == 2
        assert f"run folder {folder} is in use by process {os.getpid()}; wait until that run has ended" in err
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    RunFolder(folder, Config(), overwrite=True)
    assert not (folder / "summary.json").exists()


def test_two_experiments_do_not_add_to_one_file(command, tmp_path):
    (tmp_path / "e.yaml").write_text("methods: [mlp]\nchanges: {teacher: {max_epochs: 1}, mlp: {max_epochs: 1}}\n")
    with only_process(tmp_path / ".e.csv.lock", "", ""):
        status, _, err = command("experiment", tmp_path / "e.yaml", "--out", tmp_path / "e.csv")
    assert status == 2
    assert f"results file {tmp_path / 'e.csv'} is in use by process {os.getpid()}; more --jobs share one file" in err
    assert not (tmp_path / "e.csv").exists()


def test_two_searches_do_not_share_a_folder(command, tmp_path):
    pytest.importorskip("optuna")
    (tmp_path / "search").mkdir()
    with only_process(tmp_path / "search" / ".search.lock", "", ""):
        status, _, err = command("tune", "--trials", 1, "--out", tmp_path / "search")
    assert status == 2
    assert f"is in use by process {os.getpid()}; more --jobs share one search" in err
    assert is_free(tmp_path / "search")


LISTING = """
import sys
from pathlib import Path
from rbm.training.run_files import list_file
for i in range(40):
    list_file(Path(sys.argv[1]) / f"{sys.argv[2]}-{i}.pt2")
"""


def test_files_that_two_processes_add_are_all_listed(tmp_path):
    begin_list(tmp_path)
    writers = [subprocess.Popen([sys.executable, "-c", LISTING, str(tmp_path), name]) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert set(listed_files(tmp_path)) == {f"{name}-{i}.pt2" for name in "ab" for i in range(40)}
    list_file(tmp_path / "a-0.pt2")
    assert len(listed_files(tmp_path)) == 80
