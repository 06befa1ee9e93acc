"""Predictions from files in chunks: the same numbers as at once, and no partial file if the input is bad."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from saved_runs import forget_files, save_run

import rbm
from rbm.datasets.encodings import transfer
from rbm.serving import feature_files, neighbors, prediction
from rbm.serving.prediction import predict_file
from rbm.utils.locks import remove_abandoned

F, D, ROWS, NODES = 6, 4, 23, 30


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(feature_files, "_PIECE_ROWS", 5)
    monkeypatch.setattr(neighbors, "_EDGES_AT_ONCE", 7)


@pytest.fixture
def run(tmp_path):
    return save_run(tmp_path / "run", F)


@pytest.fixture
def x() -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(ROWS, F)).astype(np.float32)
    return np.where(x > 0.5, x.round(3), 0).astype(np.float32)  # sparse, and exact as text


def save_parquet(path: Path, x: np.ndarray, *, lists: bool = False, index: bool = False) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"x": list(x)} if lists else {f"f{i}": column for i, column in enumerate(x.T)}
    columns |= {"__index_level_0__": range(len(x))} if index else {}
    parquet.write_table(pyarrow.table(columns), path)


def halves(x: np.ndarray) -> sp.csr_matrix:
    """Each entry stored as two halves, zeros as well, with the columns of a row in no order."""
    columns = np.tile([*range(F)[::-1], *range(F)], len(x))
    values = np.concatenate([x[:, ::-1], x], axis=1).ravel() / 2
    return sp.csr_matrix((values, columns, np.arange(0, len(columns) + 1, 2 * F)), x.shape)


SAVE = {
    "float32.npy": np.save,
    "fortran.npy": lambda path, x: np.save(path, np.asfortranarray(x)),
    "float64.npy": lambda path, x: np.save(path, x.astype(">f8")),
    "dense.npz": lambda path, x: np.savez(path, x=x),
    "sparse.npz": lambda path, x: sp.save_npz(path, sp.csr_matrix(x)),
    "halves.npz": lambda path, x: sp.save_npz(path, halves(x)),
    "plain.csv": lambda path, x: np.savetxt(path, x, delimiter=",", fmt="%.3f"),
    "header.csv": lambda path, x: np.savetxt(path, x, delimiter=",", fmt="%.3f", header="a,b,c,d,e,f", comments=""),
    "columns.parquet": save_parquet,
    "lists.parquet": lambda path, x: save_parquet(path, x, lists=True),
}


@pytest.mark.parametrize("name", SAVE)
def test_every_format_of_features_gives_the_same_predictions(run, x, tmp_path, name):
    SAVE[name](tmp_path / name, x)
    assert predict_file(run, tmp_path / name, tmp_path / "out.npy") == ROWS
    with torch.inference_mode():
        expected = rbm.load(run)(torch.from_numpy(x)).softmax(-1)
    got = np.load(tmp_path / "out.npy")
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("name", ["float32.npy", "dense.npz", "columns.parquet"])
def test_columns_of_true_and_false_are_features_as_in_training(run, tmp_path, name):
    x = np.random.default_rng(0).random((ROWS, F)) < 0.5
    SAVE[name](tmp_path / name, x)
    predict_file(run, tmp_path / name, tmp_path / "out.npy")
    with torch.inference_mode():
        expected = rbm.load(run)(torch.from_numpy(x).float()).softmax(-1)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("text", ["a,b,c,d,e,f\n", "mean age,b,c,d,e,f", "\ufeffa b c d e f\n\n"])
def test_a_header_alone_is_a_table_without_rows(run, tmp_path, text):
    (tmp_path / "x.csv").write_text(text)
    assert predict_file(run, tmp_path / "x.csv", tmp_path / "out.npy") == 0
    assert np.load(tmp_path / "out.npy").shape == (0, 3)


def test_a_header_alone_has_the_columns_of_the_features(run, tmp_path):
    (tmp_path / "x.csv").write_text("a,b,c\n")
    with pytest.raises(ValueError, match=r"holds an array of shape \[\*, 3\], expected \[\*, 6\]"):
        predict_file(run, tmp_path / "x.csv", tmp_path / "out.npy")


def test_one_row_below_names_with_blanks_and_no_newline_at_its_end(run, tmp_path):
    (tmp_path / "x.csv").write_text("mean age,b,c,d,e,f\n1,2,3,4,5,6")
    assert predict_file(run, tmp_path / "x.csv", tmp_path / "out.npy") == 1


def test_columns_of_whole_numbers_are_features(run, tmp_path):
    pytest.importorskip("pyarrow")
    x = np.random.default_rng(0).integers(-5, 5, (ROWS, F))
    save_parquet(tmp_path / "x.parquet", x)
    predict_file(run, tmp_path / "x.parquet", tmp_path / "out.npy")
    np.save(tmp_path / "x.npy", x)
    predict_file(run, tmp_path / "x.npy", tmp_path / "other.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), np.load(tmp_path / "other.npy"))


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


@pytest.mark.parametrize("ending", ["npy", "csv", "parquet"])
def test_no_rows(run, tmp_path, ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    np.save(tmp_path / "x.npy", np.zeros((0, F)))
    assert predict_file(run, tmp_path / "x.npy", tmp_path / f"out.{ending}") == 0
    if ending == "npy":
        assert np.load(tmp_path / "out.npy").shape == (0, 3)


@pytest.mark.parametrize("length", [-1, F], ids=["lists", "lists of one length"])
def test_no_rows_in_a_column_of_lists(run, tmp_path, length):
    """Spark writes partitions without rows."""
    pyarrow = pytest.importorskip("pyarrow")
    none = pyarrow.array([], pyarrow.list_(pyarrow.float32(), length))
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"x": none}), tmp_path / "x.parquet")
    assert predict_file(run, tmp_path / "x.parquet", tmp_path / "out.npy") == 0
    assert np.load(tmp_path / "out.npy").shape == (0, 3)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((rows, F), "it had 23 rows when it was opened and .*changed") for rows in (7, 10, 46)]
    + [((ROWS, F + 1), "rows from 5 on hold 7 numbers, not 6")],
)
def test_features_that_another_process_replaces_meanwhile(run, x, tmp_path, monkeypatch, shape, message):
    """The file is mapped anew for each chunk of five rows, and the number of rows is that of the first mapping."""
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "other.npy", np.resize(x, shape))
    predict = prediction.predict_probabilities

    def replace(*arguments):
        if (tmp_path / "other.npy").exists():
            (tmp_path / "other.npy").replace(tmp_path / "x.npy")
        return predict(*arguments)

    monkeypatch.setattr(prediction, "predict_probabilities", replace)
    with pytest.raises(ValueError, match=rf"x\.npy cannot be read \({message}"):
        predict_file(run, tmp_path / "x.npy", tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()


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
    line = {1: 9, -1: 0}[order]
    with pytest.raises(
        ValueError, match=rf"line {line} names {ROWS}, expected 0 to {ROWS - 1}, one of the {ROWS} rows"
    ):
        predict_file(run, tmp_path / f"x.{features}", tmp_path / "out.csv", neighbors=tmp_path / "n.npy")
    assert not list(tmp_path.glob("out*"))


def cut(path: Path, share: float = 0.6) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


def bad_row(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x[17, 2] = 1e300  # beyond float32
    return x


FAULTS = {
    "cut.npy": (
        lambda p, x: (np.save(p, x), cut(p)),
        r"cut\.npy cannot be read \(its header declares \[23, 6\] of float32, 552 bytes, but 280 follow",
    ),
    "cut.npz": (lambda p, x: (np.savez(p, x=x), cut(p)), r"cut\.npz cannot be read"),
    "cut.parquet": (lambda p, x: (save_parquet(p, x), cut(p)), r"cut\.parquet cannot be read"),
    "cut.csv": (lambda p, x: (SAVE["plain.csv"](p, x), cut(p, 0.95)), r"cut\.csv cannot be read .*do not all hold 6"),
    "foreign.npy": (lambda p, x: p.write_bytes(b"%PDF-1.7 " * 99), r"foreign\.npy cannot be read"),
    "foreign.npz": (lambda p, x: p.write_bytes(b"%PDF-1.7 " * 99), r"foreign\.npz cannot be read"),
    "foreign.csv": (lambda p, x: p.write_bytes(bytes(range(256)) * 9), r"foreign\.csv cannot be read"),
    "foreign.parquet": (lambda p, x: p.write_bytes(b"%PDF-1.7 " * 99), r"foreign\.parquet cannot be read"),
    "archive.npy": (lambda p, x: (np.savez(f"{p}.npz", x=x), Path(f"{p}.npz").rename(p)), r"holds an archive, not"),
    "words.npy": (lambda p, x: np.save(p, np.array([["a"] * F])), r"holds <U1, not real numbers"),
    "complex.npy": (lambda p, x: np.save(p, x * 1j), r"holds complex64, not real numbers"),
    "complex.npz": (lambda p, x: np.savez(p, x=x * 1j), r"holds complex64, not real numbers"),
    "words.npz": (lambda p, x: np.savez(p, x=np.array([["a"] * F])), r"holds <U1, not real numbers"),
    "objects.npz": (lambda p, x: np.savez(p, x=x.astype(object)), r"holds Python objects, whose pickle may run"),
    "others.npz": (lambda p, x: np.savez(p, y=x, z=x), r"cannot be read \(it holds y, z\)"),
    "words.csv": (
        lambda p, x: p.write_text("1,2,3,4,5,6\n" * 9 + "1,2,3,x,5,6\n"),
        r"line 10 is '1,2,3,x,5,6', expected numbers",
    ),
    "pandas.csv": (lambda p, x: p.write_text("0,1,2,3,4,5\n" + "1,2,3,4,5,6\n" * 9), r"line 1 counts 0, 1, 2 to 5, "),
    "empty.csv": (lambda p, x: p.write_text(""), r"it holds no row"),
    "names.parquet": (lambda p, x: save_parquet(p, x.astype(str)), r"its column 'f0' is string, not numbers"),
    "pandas.parquet": (
        lambda p, x: save_parquet(p, x, index=True),
        r"its column '__index_level_0__' is an index of rows, as pandas writes it: write the table with index=False",
    ),
    "text.parquet": (
        lambda p, x: save_parquet(p, x.astype(str), lists=True),
        r"its column 'x' is list<\w+: string>, not numbers",
    ),
    "null.parquet": (
        lambda p, x: save_parquet(p, [*x, None], lists=True),
        r"its column 'x' lacks the list of a row; fill it in",
    ),
    "first.parquet": (
        lambda p, x: save_parquet(p, [None, *x], lists=True),
        r"its column 'x' lacks the list of a row; fill it in",
    ),
    "unlike.parquet": (lambda p, x: save_parquet(p, [*x, x[0, :2]], lists=True), r"unlike\.parquet cannot be read"),
    "huge.npy": (lambda p, x: np.save(p, bad_row(x)), r"row 17 holds NaN or infinity \(1 such rows from 15 to 19\)"),
    "huge.npz": (
        lambda p, x: sp.save_npz(p, sp.csr_matrix(bad_row(x))),
        r"row 17 holds NaN or infinity \(1 such rows from 15 to 19\)",
    ),
    "zeros.npz": (
        lambda p, x: sp.save_npz(p, halves(np.where(np.arange(ROWS)[:, None] == 17, np.nan, x))),
        r"row 17 holds NaN or infinity \(1 such rows from 15 to 19\)",
    ),
    "flat.npy": (lambda p, x: np.save(p, x[0]), r"holds an array of shape \[6\], expected \[\*, 6\]"),
    "narrow.csv": (lambda p, x: SAVE["plain.csv"](p, x[:, :4]), r"shape \[\*, 4\], expected \[\*, 6\]"),
    "narrow.npy": (lambda p, x: np.save(p, x[:, :4]), r"shape \[23, 4\], expected \[\*, 6\]"),
    "sheet.xlsx": (
        lambda p, x: p.write_bytes(b"PK"),
        r"ends in '\.xlsx', expected one of \.npy, \.npz, \.csv, \.parquet",
    ),
}


@pytest.mark.parametrize(("name", "fault"), FAULTS.items(), ids=FAULTS)
def test_a_bad_file_is_told_and_leaves_what_was_there(run, x, tmp_path, name, fault):
    make, message = fault
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    make(tmp_path / name, x)
    (tmp_path / "out.npy").write_text("the one before")
    with pytest.raises(ValueError, match=message):
        predict_file(run, tmp_path / name, tmp_path / "out.npy")
    assert (tmp_path / "out.npy").read_text() == "the one before"
    assert not list(tmp_path.glob("*.partial"))


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
