"""``rbm predict`` on plain features of nodes of the training graph, of new nodes, and of nodes without edges."""

import numpy as np
import pytest
import torch

import rbm
from rbm.config import Config
from rbm.datasets.encodings import transfer
from rbm.serving import feature_files, neighbors, prediction
from rbm.serving.prediction import predict_file
from rbm.training.run_folder import RunFolder, SavedStudent, save_students

F, D, ROWS, NODES = 6, 4, 23, 30


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(feature_files, "_PIECE_ROWS", 5)
    monkeypatch.setattr(neighbors, "_EDGES_AT_ONCE", 7)


@pytest.fixture
def known() -> torch.Tensor:
    return torch.randn(NODES, D)


@pytest.fixture
def run(tmp_path, known):
    folder = tmp_path / "run"
    run, student = RunFolder(folder, Config()), rbm.MLPStudent(F + D, 8, 3)
    student.encodings = D
    run.save_phase("mlp", student, {})
    run.save_tensors("encodings", {"encodings": known})
    save_students(folder, "mlp", {"mlp": SavedStudent(student, "encodings")})
    return folder


def save(folder, rows=ROWS, ending="npy", **tables):
    """Write features and tables of whole numbers to files, and return the features."""
    x = np.random.default_rng(0).normal(size=(rows, F)).astype(np.float32).round(3)
    for name, table in {"x": x, **tables}.items():
        if ending == "npy":
            np.save(folder / f"{name}.npy", table)
        else:
            np.savetxt(folder / f"{name}.csv", table, delimiter=",", fmt="%.3f" if name == "x" else "%d")
    return torch.from_numpy(x)


def answers(run, x, encodings):
    with torch.inference_mode():
        return rbm.load(run, quiet=True)(torch.cat([x, encodings], dim=1)).softmax(-1).numpy()


@pytest.mark.parametrize("ending", ["npy", "csv"])
def test_known_nodes_have_their_encodings(run, known, tmp_path, ending):
    nodes = np.random.default_rng(1).integers(0, NODES, ROWS)
    x = save(tmp_path, ending=ending, nodes=nodes)
    predict_file(run, tmp_path / f"x.{ending}", tmp_path / "out.npy", nodes=tmp_path / f"nodes.{ending}")
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), answers(run, x, known[nodes]), atol=1e-6)


@pytest.mark.parametrize("ending", ["npy", "csv"])
def test_all_nodes_in_their_order(run, known, tmp_path, ending):
    x = save(tmp_path, NODES, ending)
    predict_file(run, tmp_path / f"x.{ending}", tmp_path / "out.npy", nodes="all")
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), answers(run, x, known), atol=1e-6)
    for rows in (NODES - 1, NODES + 1):
        save(tmp_path, rows, ending)
        with pytest.raises(
            ValueError, match=rf"{NODES} nodes, which nodes=all takes in their order, and .*{rows} rows"
        ):
            predict_file(run, tmp_path / f"x.{ending}", tmp_path / "other.npy", nodes="all")
        assert not (tmp_path / "other.npy").exists()


@pytest.mark.parametrize("table", ["nodes", "neighbors"])
def test_a_table_that_another_process_replaces_meanwhile(run, tmp_path, monkeypatch, table):
    """Tables are mapped anew for each chunk of rows, and were checked when they were opened."""
    rows = np.arange(ROWS)
    tables = {"nodes": rows, "neighbors": np.stack([rows, rows], axis=1)}
    save(tmp_path, **tables)
    np.save(tmp_path / "other.npy", tables[table] + 1)
    predict = prediction.predict_probabilities

    def replace(*arguments):
        if (tmp_path / "other.npy").exists():
            (tmp_path / "other.npy").replace(tmp_path / f"{table}.npy")
        return predict(*arguments)

    monkeypatch.setattr(prediction, "predict_probabilities", replace)
    with pytest.raises(ValueError, match=rf"^{table} file .*{table}\.npy cannot be read \(another process has changed"):
        predict_file(run, tmp_path / "x.npy", tmp_path / "out.npy", **{table: tmp_path / f"{table}.npy"})
    assert not (tmp_path / "out.npy").exists()


def test_new_nodes_among_known_ones(run, known, tmp_path, command):
    nodes = np.arange(ROWS)
    nodes[[3, 11, 17]] = -1
    edges = np.array([[3, 4], [3, 5], [5, 9], [17, 0]])  # row 5 is a known node: its neighbour is not used
    x = save(tmp_path, nodes=nodes, edges=edges)
    predict = ("predict", run, tmp_path / "x.npy", "--nodes", tmp_path / "nodes.npy", "--out", tmp_path / "out.npy")
    status, out, err = command(*predict, "--neighbors", tmp_path / "edges.npy")
    assert (status, f"{ROWS} predictions written" in out) == (0, True)
    assert f"1 of {ROWS} rows have no neighbour in" in err
    assert "zeros for encodings: row 11 (counted from 0)" in err
    expected = known[np.maximum(nodes, 0)].clone()
    expected[3], expected[11], expected[17] = known[4:6].mean(0), 0.0, known[0]
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), answers(run, x, expected), atol=1e-6)
    status, _, err = command(*predict)
    assert (status, "row 3 (counted from 0) names -1, expected 0 to 29, one of the 30 nodes" in err) == (2, True)
    assert "or -1 for a new node with --neighbors" in err


@pytest.mark.parametrize("ending", ["npy", "csv"])
def test_rows_without_a_neighbor_are_counted_and_named(run, known, tmp_path, command, ending):
    edges = np.array([[row, row + 1] for row in range(8)])
    x = save(tmp_path, ending=ending, edges=edges)
    status, _, err = command(
        *("predict", run, tmp_path / f"x.{ending}", "--neighbors", tmp_path / f"edges.{ending}"),
        *("--out", tmp_path / "out.npy"),
    )
    assert status == 0
    assert f"15 of {ROWS} rows have no neighbour in" in err
    assert "rows 8, 9, 10, 11, 12, 13, 14, 15, 16, 17 and 5 more" in err
    pairs = torch.from_numpy(np.stack([edges[:, 1], edges[:, 0] + NODES]))
    expected = transfer(known, torch.arange(NODES), pairs, NODES + ROWS)[NODES:]
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), answers(run, x, expected), atol=1e-6)
    save(tmp_path, ending=ending, edges=np.array([[row, 2] for row in range(ROWS)]))
    _, _, err = command("predict", run, tmp_path / f"x.{ending}", "--neighbors", tmp_path / f"edges.{ending}")
    assert "no neighbor" not in err


def test_plain_features_without_either_ask_for_them(run, tmp_path):
    save(tmp_path)
    with pytest.raises(
        ValueError, match=r"of shape \[23, 6\], expected \[\*, 10\].*of its 30 nodes.*--nodes all.*--nei"
    ):
        predict_file(run, tmp_path / "x.npy", tmp_path / "out.npy")


BAD = {
    "too few": (np.arange(ROWS - 2), "holds 21 numbers, and there are 23 rows of features; write one for each row"),
    "too many": (np.arange(ROWS + 1), "holds 24 numbers, and there are 23 rows"),
    "beyond": (np.full(ROWS, NODES), r"row 0 \(counted from 0\) names 30, expected 0 to 29"),
    "late": (np.append(np.arange(ROWS - 1), NODES), r"row 22 \(counted from 0\) names 30, expected 0 to 29"),
    "pairs": (np.zeros((ROWS, 2), np.int64), r"holds int64 of shape \[23, 2\], expected whole numbers \[B\]"),
    "fractions": (np.zeros(ROWS), "holds float64"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_of_nodes(run, tmp_path, name):
    table, message = BAD[name]
    save(tmp_path, nodes=table)
    with pytest.raises(ValueError, match=message):
        predict_file(run, tmp_path / "x.npy", tmp_path / "out.npy", nodes=tmp_path / "nodes.npy")
    assert not (tmp_path / "out.npy").exists()


def test_too_few_nodes_for_rows_that_only_reading_counts(run, tmp_path):
    save(tmp_path, ending="csv", nodes=np.arange(7))
    with pytest.raises(ValueError, match=r"holds 7 numbers, and there are at least 10 rows of features"):
        predict_file(run, tmp_path / "x.csv", tmp_path / "out.npy", nodes=tmp_path / "nodes.csv")
    assert not (tmp_path / "out.npy").exists()


def test_a_neighbor_of_a_row_that_reading_does_not_find(run, tmp_path):
    save(tmp_path, ending="csv", nodes=np.full(ROWS, -1), edges=np.array([[0, 1], [ROWS, 5]]))
    files = {"nodes": tmp_path / "nodes.csv", "neighbors": tmp_path / "edges.csv"}
    with pytest.raises(ValueError, match=rf"pair 1 \(counted from 0\) names {ROWS}, expected 0 to {ROWS - 1}, one of"):
        predict_file(run, tmp_path / "x.csv", tmp_path / "out.npy", **files)
    assert not (tmp_path / "out.npy").exists()


def test_unsigned_rows_in_any_order(run, tmp_path):
    """The difference of two unsigned numbers is never below 0; rows 4 and 5, of two pieces, are out of order."""
    edges = np.stack([[*range(4), 5, 4, *range(6, ROWS)], np.arange(ROWS)], axis=1)
    for kind in (np.int64, np.uint64):
        save(tmp_path, edges=edges.astype(kind))
        out = tmp_path / f"{kind.__name__}.npy"
        predict_file(run, tmp_path / "x.npy", out, neighbors=tmp_path / "edges.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "uint64.npy"), np.load(tmp_path / "int64.npy"))


@pytest.mark.parametrize(
    "nodes", [np.array([-2, *range(1, ROWS)]), np.array([2**64 - 1, *range(1, ROWS)], dtype=np.uint64)]
)
def test_only_minus_one_is_a_new_node(run, tmp_path, nodes):
    save(tmp_path, nodes=nodes, edges=np.array([[0, 1]]))
    files = {"nodes": tmp_path / "nodes.npy", "neighbors": tmp_path / "edges.npy"}
    with pytest.raises(ValueError, match=rf"row 0 .* names {nodes[0]}, expected 0 to 29, .*, or -1 for a new node$"):
        predict_file(run, tmp_path / "x.npy", tmp_path / "out.npy", **files)


def test_a_missing_file_and_a_student_of_features_alone(run, tmp_path):
    save(tmp_path, nodes=np.arange(ROWS))
    with pytest.raises(FileNotFoundError, match=r"nodes file .*none\.npy does not exist"):
        predict_file(run, tmp_path / "x.npy", tmp_path / "out.npy", nodes=tmp_path / "none.npy")
    plain, student = RunFolder(tmp_path / "plain", Config()), rbm.MLPStudent(F, 8, 3)
    plain.save_phase("mlp", student, {})
    save_students(tmp_path / "plain", "mlp", {"mlp": SavedStudent(student, None)})
    with pytest.raises(ValueError, match=r"nodes: got .*nodes\.npy, but the student of .*plain takes features alone"):
        predict_file(tmp_path / "plain", tmp_path / "x.npy", tmp_path / "out.npy", nodes=tmp_path / "nodes.npy")


def test_tables_of_pandas(run, known, tmp_path):
    nodes, edges = np.arange(ROWS), np.array([[0, 4], [0, 5], [2, 9]])
    nodes[[0, 2]] = -1
    x = save(tmp_path)
    (tmp_path / "nodes.csv").write_text("node\n" + "".join(f"{node}\n" for node in nodes))
    (tmp_path / "edges.csv").write_text("row,node\n" + "".join(f"{row},{node}\n" for row, node in edges))
    files = {"nodes": tmp_path / "nodes.csv", "neighbors": tmp_path / "edges.csv"}
    predict_file(run, tmp_path / "x.npy", tmp_path / "out.npy", **files)
    wanted = known[np.maximum(nodes, 0)]
    wanted[0], wanted[2] = (known[4] + known[5]) / 2, known[9]
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), answers(run, x, wanted), atol=1e-6)
    (tmp_path / "edges.csv").write_text(",row,node\n0,0,4\n1,0,5\n")  # with the index
    with pytest.raises(ValueError, match=r"neighbors file .* cannot be read .*write the table with index=False"):
        predict_file(run, tmp_path / "x.npy", tmp_path / "other.npy", neighbors=tmp_path / "edges.csv")


def test_a_table_with_a_header_alone_names_nothing(run, known, tmp_path):
    """A join without a match writes one: no row has a neighbour, or there are no rows."""
    x, (nodes, edges) = save(tmp_path), (tmp_path / f"{name}.csv" for name in ("nodes", "edges"))
    edges.write_text("row,node\n")
    predict_file(run, tmp_path / "x.npy", tmp_path / "out.npy", neighbors=edges)
    np.testing.assert_allclose(
        np.load(tmp_path / "out.npy"), answers(run, x, torch.zeros(ROWS, D)), atol=1e-6, err_msg="zeros for all"
    )
    save(tmp_path, rows=0)
    nodes.write_text("node\n")
    for tables in ({"nodes": nodes}, {"neighbors": edges}, {"nodes": nodes, "neighbors": edges}):
        assert predict_file(run, tmp_path / "x.npy", tmp_path / "out.npy", **tables) == 0
    for file in (nodes, edges):
        file.write_text("")
    for tables in ({"nodes": nodes}, {"neighbors": edges}):
        with pytest.raises(ValueError, match=r"cannot be read \(it is empty, not even a header\)"):
            predict_file(run, tmp_path / "x.npy", tmp_path / "out.npy", **tables)


def test_a_word_that_is_no_file(run, tmp_path):
    save(tmp_path)
    with pytest.raises(ValueError, match=r"nodes is 'al', expected a \.npy or \.csv file .*, or the word all"):
        predict_file(run, tmp_path / "x.npy", tmp_path / "out.npy", nodes="al")
