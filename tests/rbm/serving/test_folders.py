"""Predictions for a folder of files: the same bytes as for single files, each written once, even after kills."""

import io
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from saved_runs import save_run

from rbm.serving import folders
from rbm.serving.folders import predict_folder
from rbm.serving.prediction import Predictor, predict_file

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

F, D, NODES = 6, 4, 30
ROWS = (23, 0, 7, 40)  # per file


def make_run(folder: Path, *, seed: int = 0, encodings: torch.Tensor | None = None) -> Path:
    torch.manual_seed(seed)
    return save_run(folder, F, encodings=encodings)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


@pytest.fixture
def features(tmp_path):
    folder = tmp_path / "features"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number, rows in enumerate(ROWS):
        x = generator.normal(size=(rows, F)).astype(np.float32)
        parquet.write_table(
            pyarrow.table({f"f{i}": column for i, column in enumerate(x.T)}), folder / f"part-{number}.parquet"
        )
    (folder / "_SUCCESS").touch()  # as Spark does
    return folder


def one_by_one(run: Path, features: Path, out: Path, **tables: Path) -> dict[str, bytes]:
    """The bytes that :func:`predict_file` writes for each file."""
    out.mkdir()
    for path in sorted(features.glob("*.parquet")):
        joined = {what: folder / f"{path.stem}.npy" for what, folder in tables.items()}
        predict_file(run, path, out / path.name, **joined)
    return written(out)


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.parquet"))}


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".partial")]


def test_a_folder_is_its_files(run, features, tmp_path):
    assert predict_folder(run, features, tmp_path / "out") == sum(ROWS)
    assert written(tmp_path / "out") == one_by_one(run, features, tmp_path / "alone")


def test_the_submodule_for_parquet_is_imported(run, features, tmp_path, monkeypatch):
    """``import pyarrow`` alone does not have it, and in a process of ``rbm predict`` nothing else imports it before."""
    monkeypatch.delattr(pyarrow, "parquet")
    assert predict_folder(run, features, tmp_path / "out") == sum(ROWS)


def test_hidden_files_are_not_features(run, features, tmp_path):
    for name in ("_metadata.parquet", ".part-9.parquet"):
        (features / name).write_bytes(b"")
    assert predict_folder(run, features, tmp_path / "out") == sum(ROWS)


def test_weights_of_8_bits(run, features, tmp_path):
    predict_folder(run, features, tmp_path / "out", quantize="int8")
    predict_file(run, features / "part-0.parquet", tmp_path / "alone.parquet", quantize="int8")
    assert (tmp_path / "out" / "part-0.parquet").read_bytes() == (tmp_path / "alone.parquet").read_bytes()
    with pytest.raises(FileExistsError, match="is of another call, which differs in student;"):
        predict_folder(run, features, tmp_path / "out")


def test_one_call_at_a_time(run, features, tmp_path, monkeypatch):
    predict = Predictor.predict

    def ask_again(self, *arguments, **options):
        with pytest.raises(
            BlockingIOError, match=rf"predictions folder .*out is in use by process {os.getpid()}; wait"
        ):
            predict_folder(run, features, tmp_path / "out")
        return predict(self, *arguments, **options)

    monkeypatch.setattr(Predictor, "predict", ask_again)
    assert predict_folder(run, features, tmp_path / "out") == sum(ROWS)


def test_tables_of_nodes_and_neighbors(features, tmp_path):
    """Each file of features has its own tables, with rows counted from 0; new rows get their neighbours' mean."""
    run = make_run(tmp_path / "run", encodings=torch.randn(NODES, D))
    generator, tables = np.random.default_rng(1), {"nodes": tmp_path / "nodes", "neighbors": tmp_path / "neighbors"}
    for folder in tables.values():
        folder.mkdir()
    for number, rows in enumerate(ROWS):
        np.save(tables["nodes"] / f"part-{number}.npy", generator.integers(-1, NODES, rows))
        edges = np.stack([generator.integers(0, max(rows, 1), 2 * rows), generator.integers(0, NODES, 2 * rows)], 1)
        np.save(tables["neighbors"] / f"part-{number}.npy", edges[edges[:, 0].argsort()])
    assert predict_folder(run, features, tmp_path / "out", **tables) == sum(ROWS)
    assert written(tmp_path / "out") == one_by_one(run, features, tmp_path / "alone", **tables)
    (tables["nodes"] / "part-2.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"nodes folder .* has neither part-2\.npy nor \.csv"):
        predict_folder(run, features, tmp_path / "other", **tables)
    assert not (tmp_path / "other").exists()


def test_a_command_says_what_was_there_before(command, run, features, tmp_path):
    """Regression test: it said that all predictions were written."""
    arguments = ("predict", run, features, "--out", tmp_path / "out")
    assert "from an earlier call" not in command(*arguments)[2]
    (tmp_path / "out" / "part-2.parquet").unlink()
    for finished in (3, 4):
        status, out, err = command(*arguments)
        assert (status, out) == (0, f"70 predictions in {tmp_path / 'out'}\n")
        assert f"{finished} of 4 files have predictions from an earlier call, which stay" in err


def test_rows_without_a_neighbor_are_named_with_their_file(features, tmp_path):
    run = make_run(tmp_path / "run", encodings=torch.randn(NODES, D))
    neighbors = tmp_path / "neighbors"
    neighbors.mkdir()
    for number, rows in enumerate(ROWS):
        np.save(neighbors / f"part-{number}.npy", np.stack([np.arange(rows), np.arange(rows) % NODES], 1)[: rows - 1])
    console = Console(file=io.StringIO(), width=300)
    predict_folder(run, features, tmp_path / "out", neighbors=neighbors, console=console)
    lines = console.file.getvalue()
    assert "part-0.parquet: 1 of 23 rows have no neighbour in" in lines
    assert "row 39 (counted from 0)" in lines
    assert "part-1.parquet" not in lines, "it has no rows"


def test_what_is_there_is_not_made_again(run, features, tmp_path, monkeypatch):
    """A killed call leaves complete files and a temporary one; the next call makes missing or truncated files."""
    out = tmp_path / "out"
    expected = one_by_one(run, features, tmp_path / "alone")
    asked, predict = [], Predictor.predict

    def killed(self, path, *arguments, **options):
        asked.append(Path(path).name)
        if len(asked) == 3:
            (out / ".part-2.parquet-0123.partial").write_bytes(b"half")
            raise KeyboardInterrupt
        return predict(self, path, *arguments, **options)

    monkeypatch.setattr(Predictor, "predict", killed)
    with pytest.raises(KeyboardInterrupt):
        predict_folder(run, features, out)
    assert sorted(written(out)) == ["part-0.parquet", "part-1.parquet"]
    (out / "part-1.parquet").write_bytes(b"PAR1")
    parquet.write_table(parquet.read_table(out / "part-0.parquet").slice(0, 3), out / "part-2.parquet")  # too few rows
    before = (out / "part-0.parquet").stat().st_mtime_ns
    assert predict_folder(run, features, out) == sum(ROWS)
    assert asked == ["part-0.parquet", "part-1.parquet", "part-2.parquet"] + [f"part-{n}.parquet" for n in (1, 2, 3)]
    assert (out / "part-0.parquet").stat().st_mtime_ns == before
    assert written(out) == expected
    assert hidden(out) == []


def test_predictions_of_something_else_stay(run, features, tmp_path):
    out, other = tmp_path / "out", make_run(tmp_path / "other", seed=1)
    predict_folder(run, features, out)
    before = written(out)
    with pytest.raises(FileExistsError, match="is of another call, which differs in student;"):
        predict_folder(other, features, out)
    table, size = parquet.read_table(features / "part-0.parquet"), (features / "part-0.parquet").stat().st_size
    more = [pyarrow.compute.add(column, pyarrow.scalar(1, pyarrow.float32())) for column in table.columns]
    parquet.write_table(pyarrow.table(more, table.column_names), features / "part-0.parquet")
    assert (features / "part-0.parquet").stat().st_size == size
    with pytest.raises(FileExistsError, match="is of another call, which differs in features;"):
        predict_folder(run, features, out)
    parquet.write_table(table.take(np.arange(len(table))[::-1]), features / "part-0.parquet")
    assert (features / "part-0.parquet").stat().st_size == size
    with pytest.raises(FileExistsError, match="is of another call, which differs in features;"):
        predict_folder(run, features, out)
    parquet.write_table(table, features / "part-0.parquet")
    assert predict_folder(run, features, out) == sum(ROWS), "as it was"
    (features / "part-3.parquet").unlink()
    with pytest.raises(FileExistsError, match="is of another call, which differs in features;"):
        predict_folder(run, features, out)
    assert written(out) == before
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds other files; name a new or an empty one"):
        predict_folder(run, features, foreign)


def test_features_that_are_changed_in_the_middle_are_warned_of(run, tmp_path, caplog):
    """Regression test: one value in a file of more than a MiB was changed, and old predictions stayed in silence."""
    (folder := tmp_path / "features").mkdir()
    x = np.random.default_rng(0).normal(size=(90_000, F)).astype(np.float32)

    def write() -> None:
        columns = {f"f{i}": column for i, column in enumerate(x.T)}
        parquet.write_table(pyarrow.table(columns), folder / "part.parquet", compression="none", use_dictionary=False)

    write()
    size = (folder / "part.parquet").stat().st_size
    assert size > 2 * 2**20
    for _ in range(2):
        predict_folder(run, folder, tmp_path / "out")
    assert not caplog.records
    x[10, 0] = 0.5
    write()
    assert (folder / "part.parquet").stat().st_size == size
    predict_folder(run, folder, tmp_path / "out")
    assert "were modified since the first call, such as part.parquet." in caplog.text


def test_predictions_with_other_neighbors_stay(features, tmp_path):
    run, neighbors = make_run(tmp_path / "run", encodings=torch.randn(NODES, D)), tmp_path / "neighbors"
    neighbors.mkdir()
    for number in range(len(ROWS)):
        np.save(neighbors / f"part-{number}.npy", np.zeros((0, 2), np.int64))
    predict_folder(run, features, tmp_path / "out", neighbors=neighbors)
    np.save(neighbors / "part-2.npy", np.array([[0, 1]]))
    with pytest.raises(FileExistsError, match="is of another call, which differs in tables;"):
        predict_folder(run, features, tmp_path / "out", neighbors=neighbors)
    for _ in range(2):
        predict_folder(run, features, tmp_path / "next", neighbors=neighbors)
    np.save(neighbors / "part-2.npy", np.array([[0, 2]]))  # of the same size
    with pytest.raises(FileExistsError, match="is of another call, which differs in tables;"):
        predict_folder(run, features, tmp_path / "next", neighbors=neighbors)


def test_a_call_that_was_killed_before_its_first_file_is_continued(run, features, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".predictions.json-0123456789abcdef.partial").write_text("{")
    assert predict_folder(run, features, out) == sum(ROWS)
    assert hidden(out) == []


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(features="nothing"), FileNotFoundError, "features folder .*nothing does not exist; name a folder"),
        (dict(features="features/part-0.parquet"), FileNotFoundError, "is a file, and files are shared out"),
        (dict(out="features"), ValueError, "is the features folder; name another"),
        (dict(out="no/where"), FileNotFoundError, "folder .*no does not exist; make it"),
        (dict(out="run/student.json"), FileExistsError, "predictions folder run/student.json is a file; name a folder"),
        (dict(workers=2), ValueError, "workers: got 2 without ray"),
        (dict(ray=True, workers=0), ValueError, "workers: got 0, expected 1 or more"),
        (dict(nodes="features"), FileNotFoundError, "has neither part-0.npy nor .csv"),
    ],
    ids=["missing", "file", "same", "nowhere", "out is a file", "workers", "none", "tables"],
)
def test_what_makes_no_sense_is_named_and_writes_nothing(run, features, tmp_path, monkeypatch, change, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        predict_folder(**{"run": run, "features": features, "out": "out", **change})
    assert not Path("out").exists()


def test_a_bad_row_is_named_and_other_files_are_kept(run, features, tmp_path):
    table = parquet.read_table(features / "part-2.parquet").to_pydict()
    table["f1"][3] = float("nan")
    parquet.write_table(pyarrow.table(table), features / "part-2.parquet")
    with pytest.raises(ValueError, match=r"part-2\.parquet: row 3 holds NaN"):
        predict_folder(run, features, tmp_path / "out")
    assert sorted(written(tmp_path / "out")) == ["part-0.parquet", "part-1.parquet"]


def test_ray_that_is_not_installed_is_named(run, features, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"ray is asked for, but not installed: pip install 'rbm-kernels\[ray\]'"):
        predict_folder(run, features, tmp_path / "out", ray=True)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def cluster(monkeypatch):
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise Ray writes a secret into the home folder
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


# A plugin, which workers load as well: the first worker that gets part-2 dies with half of the file written.
DEADLY = """
import os, signal
from pathlib import Path
from rbm.serving.prediction import Predictor

MARK = Path({mark!r})
predict = Predictor.predict

def deadly(self, features, out, **options):
    with open(MARK, "a") as file:
        file.write(f"{{os.getpid()}} {{Path(features).name}}\\n")
    if Path(features).name == "part-2.parquet" and MARK.read_text().count("part-2.parquet") == 1:
        Path(out).with_name(".part-2.parquet-0123.partial").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return predict(self, features, out, **options)

Predictor.predict = deadly
"""


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_its_own_file(cluster, run, features, tmp_path, monkeypatch):
    expected = one_by_one(run, features, tmp_path / "alone")
    mark, plugin, out = tmp_path / "mark", tmp_path / "deadly.py", tmp_path / "out"
    plugin.write_text(DEADLY.format(mark=str(mark)))
    monkeypatch.setattr(folders, "loaded_plugins", lambda: (str(plugin),))
    assert predict_folder(run, features, out, ray=True, workers=2) == sum(ROWS)
    assert cluster.is_initialized(), "a cluster that was there before stays"
    assert written(out) == expected
    assert hidden(out) == []
    asked = [line.split() for line in mark.read_text().splitlines()]
    assert sorted(name for _, name in asked) == sorted([*expected, "part-2.parquet"]), "each once, the killed one twice"
    assert str(os.getpid()) not in {process for process, _ in asked}
    # A second call has nothing to do; if a file is deleted, only that file is made again.
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    (out / "part-0.parquet").unlink()
    time.sleep(0.01)
    assert predict_folder(run, features, out, ray=True, workers=1) == sum(ROWS)
    assert written(out) == expected
    changed = {path.name for path in out.glob("*.parquet") if path.stat().st_mtime_ns != before[path.name]}
    assert changed == {"part-0.parquet"}
    with pytest.raises(ValueError, match="workers: got 3, but the cluster has 2 processors; ask for fewer"):
        predict_folder(run, features, tmp_path / "many", ray=True, workers=3)
