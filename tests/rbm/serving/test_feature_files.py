"""Files of features in chunks: every format means the same rows, and a bad file is told before anything is lost."""

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from saved_features import ROWS, SAVE, F, halves, save_parquet

import rbm
from rbm.serving import prediction
from rbm.serving.prediction import predict_file

pytestmark = pytest.mark.usefixtures("small_pieces")


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


def test_a_column_of_lists_beside_columns_of_numbers(run, tmp_path):
    """As in the table of features that a student was trained on."""
    pyarrow = pytest.importorskip("pyarrow")
    x = np.random.default_rng(0).standard_normal((ROWS, F)).astype(np.float32)
    table = pyarrow.table({"age": x[:, 0], "embedding": list(x[:, 1:-1]), "z": x[:, -1]})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "x.parquet")
    predict_file(run, tmp_path / "x.parquet", tmp_path / "out.npy")
    np.save(tmp_path / "x.npy", x)
    predict_file(run, tmp_path / "x.npy", tmp_path / "other.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), np.load(tmp_path / "other.npy"))


@pytest.mark.parametrize("length", [-1, F], ids=["lists", "lists of one length"])
def test_no_rows_in_a_column_of_lists(run, tmp_path, length):
    """Spark writes partitions without rows."""
    pyarrow = pytest.importorskip("pyarrow")
    none = pyarrow.array([], pyarrow.list_(pyarrow.float32(), length))
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"x": none}), tmp_path / "x.parquet")
    assert predict_file(run, tmp_path / "x.parquet", tmp_path / "out.npy") == 0
    assert np.load(tmp_path / "out.npy").shape == (0, 3)


@pytest.mark.parametrize("shape", [(7, F), (ROWS, F), (46, F), (ROWS, F + 1)])
def test_features_that_another_process_replaces_meanwhile(run, x, tmp_path, monkeypatch, shape):
    """The file is mapped anew for each chunk of five rows: those of another file would be mixed with the first ones."""
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "other.npy", np.resize(-x, shape))
    predict = prediction.predict_probabilities

    def replace(*arguments):
        if (tmp_path / "other.npy").exists():
            (tmp_path / "other.npy").replace(tmp_path / "x.npy")
        return predict(*arguments)

    monkeypatch.setattr(prediction, "predict_probabilities", replace)
    with pytest.raises(ValueError, match=r"x\.npy cannot be read \(another process has changed it since"):
        predict_file(run, tmp_path / "x.npy", tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()


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
    "returns.csv": (lambda p, x: p.write_bytes(b"a,b,c,d,e,f\r1,2,3,4,5,6\r"), r"line 1 has a carriage return inside"),
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
    "huge.npy": (lambda p, x: np.save(p, bad_row(x)), r"row 17 holds NaN or infinity \(1 .* up to 3\.4e38"),
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
