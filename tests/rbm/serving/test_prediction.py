"""Predictions from files in chunks: the same numbers as at once, and no partial file if the input is bad."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from saved_features import ROWS, SAVE, F
from saved_runs import forget_files, save_run

import rbm
from rbm.datasets.encodings import transfer
from rbm.serving import neighbors
from rbm.serving.prediction import predict_file
from rbm.utils.locks import remove_abandoned

D, NODES = 4, 30


pytestmark = pytest.mark.usefixtures("small_pieces")


@pytest.fixture(autouse=True)
def _few_edges_at_once(monkeypatch):
    monkeypatch.setattr(neighbors, "_EDGES_AT_ONCE", 7)


def test_every_format_of_predictions_says_the_same(run, x, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    np.save(tmp_path / "x.npy", x)
    for ending in ("npy", "csv", "parquet"):
        predict_file(run, tmp_path / "x.npy", tmp_path / f"out.{ending}")
    probabilities = np.load(tmp_path / "out.npy")
    assert probabilities.shape == (ROWS, 3)
    header, *lines = (tmp_path / "out.csv").read_text().split()
    table = np.array([line.split(",") for line in lines], dtype=np.float64)
    columns = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert header.split(",") == list(columns)
    assert table[:, 0].tolist() == columns["row"] == list(range(ROWS))
    assert table[:, 1].tolist() == columns["class"] == probabilities.argmax(1).tolist()
    np.testing.assert_allclose(table[:, 2], probabilities.max(1), atol=1e-6)
    np.testing.assert_array_equal(columns["probability"], probabilities.max(1))


def test_numbers_too_large_for_the_student(run, x, tmp_path):
    """Float32 can hold them, but not the student's sums."""
    x[7] = 3e38
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(ValueError, match=r"out.csv: the features of row 7 \(counted from 0\) are so large"):
        predict_file(run, tmp_path / "x.npy", tmp_path / "out.csv")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("ending", ["npy", "csv", "parquet"])
def test_no_rows(run, tmp_path, ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    np.save(tmp_path / "x.npy", np.zeros((0, F)))
    assert predict_file(run, tmp_path / "x.npy", tmp_path / f"out.{ending}") == 0
    if ending == "npy":
        assert np.load(tmp_path / "out.npy").shape == (0, 3)


@pytest.mark.parametrize("ending", ["npy", "csv"])
@pytest.mark.parametrize("order", ["ascending", "shuffled", "ascending in each chunk"])
@pytest.mark.parametrize("features", ["npy", "csv"])
def test_neighbors_piece_by_piece(tmp_path, x, features, order, ending):
    known = torch.randn(NODES, D)
    run = save_run(tmp_path / "run", F, encodings=known)
    generator = np.random.default_rng(1)
    edges = np.stack([np.sort(generator.integers(0, ROWS, 40)), generator.integers(0, NODES, 40)], axis=1)
    edges = edges[(edges[:, 0] < 10) | (edges[:, 0] >= 15)]  # a whole chunk of five rows has no edge
    if order == "shuffled":
        edges = generator.permutation(edges)
    elif order == "ascending in each chunk":  # the second chunk of seven edges begins within the first
        edges = edges[[*range(0, 14, 2), *range(1, 14, 2), *range(14, len(edges))]]
    SAVE[{"npy": "float32.npy", "csv": "plain.csv"}[features]](tmp_path / f"x.{features}", x)
    if ending == "npy":
        np.save(tmp_path / "n.npy", edges)
    else:
        np.savetxt(tmp_path / "n.csv", edges, delimiter=",", fmt="%d")
    predict_file(run, tmp_path / f"x.{features}", tmp_path / "out.npy", neighbors=tmp_path / f"n.{ending}")

    pairs = torch.from_numpy(np.stack([edges[:, 1], edges[:, 0] + NODES]))
    everyone = transfer(known, torch.arange(NODES), pairs, NODES + ROWS)
    with torch.inference_mode():
        expected = rbm.load(run)(torch.cat([torch.from_numpy(x), everyone[NODES:]], dim=1)).softmax(-1)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("features", ["npy", "csv"])
def test_a_neighbor_of_a_row_that_is_not_there(tmp_path, x, features, order):
    run = save_run(tmp_path / "run", F, encodings=torch.randn(NODES, D))
    SAVE[{"npy": "float32.npy", "csv": "plain.csv"}[features]](tmp_path / f"x.{features}", x)
    np.save(tmp_path / "n.npy", np.array([*([row, 1] for row in range(9)), [ROWS, 5]])[::order])
    pair = {1: 9, -1: 0}[order]
    with pytest.raises(
        ValueError, match=rf"pair {pair} .* names {ROWS}, expected 0 to {ROWS - 1}, one of the {ROWS} rows"
    ):
        predict_file(run, tmp_path / f"x.{features}", tmp_path / "out.csv", neighbors=tmp_path / "n.npy")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("features", ["npy", "csv"])
def test_a_row_of_a_neighbor_beyond_64_bits(tmp_path, x, features):
    run = save_run(tmp_path / "run", F, encodings=torch.randn(NODES, D))
    SAVE[{"npy": "float32.npy", "csv": "plain.csv"}[features]](tmp_path / f"x.{features}", x)
    np.save(tmp_path / "n.npy", np.array([[2**64 - 1, 0], [0, 1]], dtype=np.uint64))  # -1, stored without a sign
    with pytest.raises(ValueError, match=r"n\.npy: pair 0 .* names 18446744073709551615, expected 0 to"):
        predict_file(run, tmp_path / f"x.{features}", tmp_path / "out.csv", neighbors=tmp_path / "n.npy")


def test_a_place_that_cannot_be_written_to(run, x, tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(ValueError, match=r"x\.npy is the features file; name another"):
        predict_file(run, tmp_path / "x.npy", tmp_path / "run" / ".." / "x.npy")
    with pytest.raises(FileNotFoundError, match=r"folder .*nowhere does not exist"):
        predict_file(run, tmp_path / "x.npy", tmp_path / "nowhere" / "out.npy")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda folder, mode: Path(folder) != tmp_path)
        with pytest.raises(PermissionError, match=r"^predictions file .*out\.npy: no permission to write to .*; name"):
            predict_file(run, tmp_path / "x.npy", tmp_path / "out.npy")
        with pytest.raises(PermissionError, match=r"^path: .*s\.pt2: no permission to write to .*; name a file"):
            rbm.export_student(run, "torch-export", tmp_path / "s.pt2")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"out\.parquet needs pyarrow, .*rbm-kernels\[files\]"):
        predict_file(run, tmp_path / "x.npy", tmp_path / "out.parquet")


KILLED = """
import os, sys
from rbm.serving import prediction
def kill(*_):
    os.kill(os.getpid(), 9)
if sys.argv[4] == "half way":
    prediction.predict_probabilities = kill
else:
    os.fsync = kill
prediction.predict_file(*sys.argv[1:4])
"""


@pytest.mark.parametrize("when", ["half way", "before the rename"])
def test_what_a_killed_command_left_is_removed_by_the_next_one(run, x, tmp_path, when):
    np.save(tmp_path / "x.npy", x)
    arguments = [str(run), str(tmp_path / "x.npy"), str(tmp_path / "out.npy")]
    assert subprocess.run([sys.executable, "-c", KILLED, *arguments, when]).returncode == -9
    assert len(list(tmp_path.glob(".out.npy-*.partial"))) == 1
    assert predict_file(*arguments) == ROWS
    assert not list(tmp_path.glob(".*.partial"))


def test_a_file_is_not_taken_for_abandoned_before_it_has_its_name(run, x, tmp_path, monkeypatch):
    """Two commands may write one file. The lock outlasts the rows: to flush a large file takes a while."""
    np.save(tmp_path / "x.npy", x)
    fsync, fd = os.fsync, []

    def other(descriptor):
        fd.append(descriptor)
        remove_abandoned(tmp_path / "out.npy")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", other)
    assert predict_file(run, tmp_path / "x.npy", tmp_path / "out.npy") == ROWS
    assert fd


GROWTH = """
import resource, sys
from rbm.serving.prediction import predict_file
for name in sys.argv[2:]:
    predict_file(sys.argv[1], name, "out.npy")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    """32 MiB of features, then 400 of them, in pieces of the usual size."""
    width = 2048
    run = save_run(tmp_path / "run", width)
    for name, rows in (("small.npy", 2**12), ("large.npy", 50 * 2**10)):
        with open(tmp_path / name, "wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + 4 * width * rows)  # zeros that take no room on the disk
    command = [sys.executable, "-c", GROWTH, str(run), "small.npy", "large.npy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    small, large = map(int, done.stdout.split())
    assert large - small < 60, f"peak resident memory went from {small} to {large} MiB"


@pytest.mark.parametrize("way", ["by its name", "by a link"])
def test_predictions_never_replace_an_input(tmp_path, x, way):
    run = save_run(tmp_path / "run", F, encodings=torch.randn(NODES, D))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "n.npy", np.array([[0, 1]]))
    out = tmp_path / "n.npy"
    if way == "by a link":
        out = tmp_path / "out.npy"
        out.hardlink_to(tmp_path / "n.npy")
    with pytest.raises(ValueError, match=r"is the neighbors file; name another to write to"):
        predict_file(run, tmp_path / "x.npy", out, neighbors=tmp_path / "n.npy")
    assert np.load(tmp_path / "n.npy").tolist() == [[0, 1]]


def test_encodings_of_another_run(tmp_path, x):
    run = save_run(tmp_path / "run", F, encodings=torch.randn(NODES, D))
    save_run(tmp_path / "other", F, encodings=torch.randn(NODES, D + F))
    (tmp_path / "other" / "encodings.safetensors").replace(run / "encodings.safetensors")
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(ValueError, match=r"encodings\.safetensors is not the file that .* describes"):
        predict_file(run, tmp_path / "x.npy", tmp_path / "out.csv")
    forget_files(run)
    with pytest.raises(ValueError, match="holds encodings of 10 columns, and its student takes rows of 10: they"):
        predict_file(run, tmp_path / "x.npy", tmp_path / "out.csv")
