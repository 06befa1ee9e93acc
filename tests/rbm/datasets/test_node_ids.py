"""Graphs whose nodes have ids: edges, labels, masks and logits in tables refer to nodes by these."""

import json
import re
import shutil

import numpy as np
import pytest
import torch

import rbm
from rbm.datasets.readers.node_ids import NodeIds

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

NAMES = ["paper_31336", "ü 2", "user_17", "7", "e"]
X = [[0.5, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0], [8.0, 9.0]]
EDGES = [("user_17", "e"), ("e", "user_17"), ("7", "ü 2"), ("ü 2", "7")]


@pytest.fixture
def graph(tmp_path):
    """A folder with ids in tables; labels are in another order than features."""
    write(tmp_path, x=["id,f0,f1", *(f"{name},{a},{b}" for name, (a, b) in zip(NAMES, X, strict=True))])
    write(tmp_path, edges=["source,target", *map(",".join, EDGES)])
    write(tmp_path, y=["node_id,label", "e,1", "7,0", "ü 2,1", "user_17,0", "paper_31336,0"])
    write(tmp_path, train=["e", "7"], val=["id", "user_17"], test=["ü 2", "paper_31336"])
    return tmp_path


def write(folder, **tables):
    for name, lines in tables.items():
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_parts_refer_to_nodes_by_ids(graph):
    data = rbm.load_graph(graph)
    assert data.x.tolist() == X
    assert data.node_ids.names.to_pylist() == NAMES
    assert data.edge_index.tolist() == [[2, 4, 3, 1], [4, 2, 1, 3]]
    assert data.y.tolist() == [0, 1, 0, 0, 1]
    assert data.train_mask.nonzero().flatten().tolist() == [3, 4]
    assert data.val_mask.nonzero().flatten().tolist() == [2]
    assert data.test_mask.nonzero().flatten().tolist() == [0, 1]


def test_parquet_and_numbers_as_ids(graph):
    """Ids of Cora's papers are large numbers; those of a Parquet table may be integers."""
    for path in graph.iterdir():
        path.unlink()
    names = [31336, 1061127, 1106406]
    parquet.write_table(pyarrow.table({"a": [1.0, 2.0, 3.0], "id": names}), graph / "x.parquet")
    write(graph, edges=["31336\t1106406", "1106406\t31336"], y=["0", "1", "0"], train=["is in train", "1", "0", "0"])
    parquet.write_table(pyarrow.table({"id": names[::-1], "in": [1, 0, 0]}), graph / "val.parquet")
    parquet.write_table(pyarrow.table({"node": [1061127]}), graph / "test.parquet")
    write(graph, logits=["id,a,b", "1106406,0,1", "31336,2,3", "1061127,4,5"])
    data = rbm.load_graph(graph)
    assert data.x.tolist() == [[1.0], [2.0], [3.0]]
    assert data.edge_index.tolist() == [[0, 2], [2, 0]], "the first line has no names of columns"
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.int().argmax(0).tolist() == [0, 2, 1]
    assert data.teacher_logits.tolist() == [[2, 3], [4, 5], [0, 1]]


def test_without_a_column_of_ids_nothing_changes(graph):
    write(graph, x=["f0,f1", *(f"{a},{b}" for a, b in X)])
    with pytest.raises(ValueError, match=r"edges.csv .*; to use names, write the name of each row into a column 'id'"):
        rbm.load_graph(graph)
    write(graph, edges=["0,1", "1,0"], y=["0", "1", "0", "0", "1"], train=["0"], val=["1"], test=["2"])
    assert "node_ids" not in rbm.load_graph(graph)


def test_nodes_without_a_label_or_a_flag(graph):
    write(graph, y=["id,label", "e,1", "7,0", "user_17,0"], test=["id,test", "user_17,1"], val=["id,val", "e,1"])
    write(graph, train=["7"])
    data = rbm.load_graph(graph)
    assert data.y.tolist() == [-1, -1, 0, 0, 1]
    assert data.val_mask.tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("kinds", [(int, float), (float, int), (float, str)])
def test_whole_numbers_that_pandas_made_floating_point_are_the_same_ids(tmp_path, caplog, kinds):
    """As text, 10000000.0 is 1e+07; pandas makes a column of integers floating-point where one is missing."""
    ids = [10_000_000, 123_456_789_012, 7]
    first, second = ([kind(number) for number in ids] for kind in kinds)
    parquet.write_table(pyarrow.table({"id": first, "f": [1.0, 2.0, 3.0]}), tmp_path / "x.parquet")
    edges = {"a": [*second, None], "b": [*second[1:], second[0], second[0]]}
    parquet.write_table(pyarrow.table(edges), tmp_path / "edges.parquet")
    write(tmp_path, y=["0", "1", "0"], train=["1", "0", "0"], val=["0", "1", "0"], test=["0", "0", "1"])
    assert rbm.load_graph(tmp_path).edge_index.tolist() == [[0, 1, 2], [1, 2, 0]]
    assert "1 of 4 edges name nodes" in caplog.text


@pytest.mark.parametrize("part", ["x", "edges", "val"])
@pytest.mark.parametrize("odd", [[[1], [2]], [b"\xff", b"b"], [0.5, 1.0], [1e18, 2e18]])
def test_what_cannot_be_an_id(graph, part, odd):
    (graph / f"{part}.csv").unlink()
    table = {"x": {"id": odd, "f": [1, 2]}, "edges": {"id": odd, "to": odd}, "val": {"id": odd}}[part]
    parquet.write_table(pyarrow.table(table), graph / f"{part}.parquet")
    with pytest.raises(ValueError, match=rf"dataset: .*{part}\.parquet has the column 'id' of .*, expected ids"):
        rbm.load_graph(graph)


def test_nodes_that_a_table_of_all_masks_lacks(graph):
    for name in ("train", "val", "test"):
        (graph / f"{name}.csv").unlink()
    write(graph, masks=["id,train,val,test", "e,1,0,0", "7,,1,0", "user_17,0,0,1"])
    data = rbm.load_graph(graph)
    assert [data[name].nonzero().flatten().tolist() for name in ("train_mask", "val_mask", "test_mask")] == [
        [4],
        [3],
        [2],
    ]


@pytest.mark.parametrize("kind", [pyarrow.list_(pyarrow.float32()), pyarrow.list_(pyarrow.float64(), 3)], ids=str)
def test_embeddings_beside_ids(graph, kind):
    """A list of numbers in each row, as tables of text embeddings have them."""
    (graph / "x.csv").unlink()
    rows = [[0.5 * number, 0.25, -1.0] for number in range(5)]
    table = {"id": NAMES, "age": [5, 1, 3, 2, 4], "embedding": pyarrow.array(rows, kind)}
    parquet.write_table(pyarrow.table(table), graph / "x.parquet")
    data = rbm.load_graph(graph)
    assert data.x.dtype == torch.float32
    assert data.x.tolist() == [[age, *row] for age, row in zip(table["age"], rows, strict=True)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1.0], [1.0, 2.0], [1.0], [1.0], [1.0]], r"x\.parquet: its column 'e' has lists of unlike length"),
        ([[1.0], None, [1.0], [1.0], [1.0]], r"x\.parquet: its column 'e' lacks the list of a row; fill it in"),
        ([["k"], ["l"], ["m"], ["n"], ["o"]], r"x\.parquet has the column 'e', which holds no numbers"),
        ([{"k": 1.0}] * 5, r"x\.parquet has the column 'e', which holds no numbers"),
    ],
    ids=["lengths", "empty", "text", "struct"],
)
def test_lists_beside_ids_that_are_no_features(graph, rows, message):
    (graph / "x.csv").unlink()
    parquet.write_table(pyarrow.table({"id": NAMES, "e": rows}), graph / "x.parquet")
    with pytest.raises(ValueError, match=message):
        rbm.load_graph(graph)


def test_masks_of_several_splits_as_lists_in_parquet(graph):
    """A list of flags per row, in the order of the features, is no column of ids."""
    for place, name in enumerate(("train", "val", "test")):
        (graph / f"{name}.csv").unlink()
        flags = [[node == place, node == place + 2] for node in range(5)]
        parquet.write_table(pyarrow.table({"splits": flags}), graph / f"{name}.parquet")
    assert rbm.load_graph(graph, seed=1).val_mask.tolist() == [False, False, False, True, False]


def test_edges_to_unknown_nodes_are_counted_named_and_left_out(graph, caplog):
    ghosts = [f"ghost {number},e" for number in range(3)]
    write(graph, edges=["from,to", *map(",".join, EDGES), *ghosts])
    data = rbm.load_graph(graph)
    assert data.edge_index.size(1) == 4
    (told,) = [record.getMessage() for record in caplog.records if "edges" in record.getMessage()]
    assert "3 of 7 edges name nodes that" in told
    assert told.endswith("x.csv lacks: 'ghost 0', 'ghost 1', 'ghost 2'; these edges are left out.")
    write(graph, edges=["from,to", *map(",".join, EDGES), *[f"ghost {number},e" for number in range(9)]])
    with pytest.raises(ValueError, match=r"9 of 13 edges .* 'ghost 4' and 4 more; expected values of its column 'id'"):
        rbm.load_graph(graph)


@pytest.mark.parametrize(
    ("first", "unknown"),
    [
        ("from_node,toNode", 0),  # usual names
        ("customer,merchant", 0),  # unusual ones, without the digit that each id has
        ("u98,u99", 1),  # an edge whose nodes are both unknown
        ("u98,u1", 1),
        ("u2,u1", 0),
    ],
)
def test_first_line_of_edges_is_an_edge_unless_its_names_are_those_of_columns(tmp_path, caplog, first, unknown):
    write(tmp_path, x=["id,f", *(f"u{number},1" for number in range(6))], edges=[first, "u1,u2", "u3,u4"])
    write(tmp_path, y=["id,class", *(f"u{number},{number % 2}" for number in range(6))])
    edges = rbm.load_graph(tmp_path, small_classes="share").edge_index.t().tolist()
    assert edges == [*([[2, 1]] if first == "u2,u1" else []), [1, 2], [3, 4]]
    told = [record.getMessage() for record in caplog.records if "name nodes" in record.getMessage()]
    assert len(told) == unknown
    if unknown:
        assert "edges.csv: 1 of 3 edges name nodes that" in told[0]
        assert ("line 1, 'u98,u99', counts as an edge" in told[0]) == (first == "u98,u99")


def test_blanks_around_ids_do_not_count(graph):
    write(graph, edges=["source, target", " user_17, e", "e ,user_17 "])
    assert rbm.load_graph(graph).edge_index.tolist() == [[2, 4], [4, 2]]


def test_a_mark_of_the_byte_order_is_no_part_of_a_name(graph):
    """Spreadsheets write one in front of the first name."""
    for path in graph.iterdir():
        path.write_text("\ufeff" + path.read_text(encoding="utf-8"), encoding="utf-8")
    assert rbm.load_graph(graph).node_ids.names.to_pylist() == NAMES


def test_names_of_columns_among_ids_without_digits(graph, caplog):
    """Where ids have no digit, only usual names make a header."""
    write(graph, edges=["alice,bob", *map(",".join, EDGES)])
    assert rbm.load_graph(graph).edge_index.size(1) == 4
    assert "1 of 5 edges name nodes" in caplog.text


def test_no_edges_and_empty_labels(graph):
    """An empty table of edges has no edges; an empty or missing label is unknown, also in Parquet."""
    write(graph, y=["id,label", "e,1", "7,0", "ü 2,", "user_17,0", "paper_31336,nan"], test=["user_17"], val=["e"])
    write(graph, train=["7"])
    for nothing in ("", "\n", " \r\n\n"):
        (graph / "edges.csv").write_text(nothing, newline="")
        data = rbm.load_graph(graph)
        assert data.edge_index.shape == (2, 0)
    assert data.y.tolist() == [-1, -1, 0, 0, 1]
    (graph / "y.csv").unlink()
    for labels in ([1, None, 0, None, 0], [1.0, float("nan"), 0.0, None, 0.0]):
        table = {"id": ["e", "ü 2", "7", "paper_31336", "user_17"], "label": labels}
        parquet.write_table(pyarrow.table(table), graph / "y.parquet")
        assert rbm.load_graph(graph).y.tolist() == [-1, -1, 0, 0, 1]


def test_lack_of_features_is_reported_first(graph):
    (graph / "x.csv").rename(graph / "nodes.csv")
    with pytest.raises(ValueError, match=r"lacks x; expected x \(or features\).* \(it has \./nodes\.csv\)"):
        rbm.load_graph(graph)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"x": ["id,f", "a,1", "b,2", "a,3"]}, r"x\.csv holds 'a' more than once, expected distinct ids"),
        ({"x": ["id,f", "a,1", ",2"]}, r"x\.csv has an empty id"),
        ({"x": ["id", "a", "b"]}, r"x\.csv has ids and no other column, expected features"),
        ({"x": ["id,f"]}, r"x\.csv has no row below its header, expected a row for each node"),
        ({"x": ["id,node_id,f", "a,7,1"]}, r"x\.csv has ids in 'id' and 'node_id', expected one of them; drop"),
        ({"x": ["id,f,g", "a,1,red"]}, r"x\.csv has the column 'g', which holds no numbers"),
        ({"x": ["id,f,g", "a,1,"]}, r"x\.csv has 1 empty fields in its column 'g'"),
        ({"x": ["id,f,g", "a,1,2,3"]}, r"x\.csv is no table: "),
        ({"edges": ["e,7,1"]}, r"edges\.csv has 3 columns, expected two, from and to; edge weights are not used"),
        ({"y": ["id,label", "e,1", "e,0"]}, r"y\.csv holds 'e' more than once"),
        ({"y": ["id,label", "e,spam"]}, r"y\.csv has the column 'label', which holds no numbers; names become numbers"),
        ({"y": ["id", *NAMES]}, r"y\.csv has ids and no other column, expected labels beside them"),
        ({"logits": ["id", *NAMES]}, r"logits\.csv has ids and no other column, expected numbers beside them"),
        ({"y": ["e,1", "7,0"]}, r"y\.csv begins with the id of a node, expected a header such as id,label"),
        ({"y": ["id,a,b", *(f"{name},1,2" for name in NAMES)]}, r"y has shape \[5, 2\], .*; keep one of its columns"),
        ({"edges": ["e 7", "7 e"]}, r"edges\.csv has 1 columns, expected two, .*; separate them by a comma or a tab"),
        ({"y": ["id,label", "nobody,1"]}, r"y\.csv names 'nobody', expected ids of nodes in .*x\.csv"),
        ({"train": ["e", "nobody"]}, r"train\.csv names 'nobody', expected ids of nodes in .*x\.csv"),
        ({"logits": ["id,a,b", "e,1,2"]}, r"logits\.csv lacks 'paper_31336', 'ü 2', .* a row for each of the 5 nodes"),
    ],
)
def test_faults(graph, tables, message):
    write(graph, **tables)
    with pytest.raises(ValueError, match=f"^dataset: .*{message}"):
        rbm.load_graph(graph)


def test_a_column_of_names_is_pointed_out(tmp_path):
    parquet.write_table(pyarrow.table({"paper": ["a", "b"], "f": [1.0, 2.0]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="'paper', which holds no numbers; drop it, or call it 'id' if it names"):
        rbm.load_graph(tmp_path)


def test_ids_of_a_run(tmp_path):
    broken = ("a\rb", "a\nb", "a\r\nb", "a\u2028b")
    ids = NodeIds(pyarrow.array([*NAMES, *broken, 'with "quotes", and commas']), tmp_path)
    (tmp_path / "node_ids.csv").write_bytes(ids.to_csv().encode())
    again = NodeIds.of_run(tmp_path)
    assert again.names.equals(ids.names)
    assert again.rows(pyarrow.array(["7", "nobody"])).tolist() == [3, -1]
    assert again.of(np.array([4, -1])) == ["e", ""]
    assert NodeIds.of_run(tmp_path / "elsewhere") is None


def test_line_breaks_in_many_ids(tmp_path):
    """One of them is at the end of a block of the reader, which has a megabyte."""
    ids = NodeIds(pyarrow.array([f"{number}\n{'-' * 90}" for number in range(30_000)]), tmp_path)
    (tmp_path / "node_ids.csv").write_bytes(ids.to_csv().encode())
    assert NodeIds.of_run(tmp_path).names.equals(ids.names)


@pytest.mark.parametrize("damage", ["swapped", "missing"])
def test_ids_that_are_not_those_of_the_run(tmp_path, damage):
    ids = NodeIds(pyarrow.array(["a", "b", "c"]), tmp_path)
    (tmp_path / "inputs.json").write_text(json.dumps({"node_ids": ids.checksum()}))
    (tmp_path / "node_ids.csv").write_text(ids.to_csv())
    assert NodeIds.of_run(tmp_path, 3).names.equals(ids.names)
    if damage == "missing":
        (tmp_path / "node_ids.csv").unlink()
    else:
        (tmp_path / "node_ids.csv").write_text("id\nb\na\nc\n")
    with pytest.raises(ValueError, match=r"node_ids\.csv is missing, or not as the run wrote it; restore the run"):
        NodeIds.of_run(tmp_path, 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a graph with ids; its folder, and the features of all nodes."""
    folder = tmp_path_factory.mktemp("ids")
    x, y = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32), np.arange(300) % 2
    (folder / "graph").mkdir()
    write(folder / "graph", x=["id,a,b,c,d", *(f"user_{node},{','.join(map(str, row))}" for node, row in enumerate(x))])
    write(
        folder / "graph", edges=[f"user_{node},user_{(node + step) % 300}" for node in range(300) for step in (2, 298)]
    )
    write(folder / "graph", y=map(str, y))
    few = {"max_epochs": 2, "min_epochs": 0}
    config = rbm.Config().updated({"teacher": few, "mlp": few})
    data = rbm.load_graph(folder / "graph")
    for name, only in (("encoded", False), ("alone", True)):
        options = {"setting": "inductive", "folder": folder / name, "features_only": only, "measure_latency": False}
        rbm.distill(data, config=config.updated({"setting": options.pop("setting")}), methods=["mlp"], **options)
    np.save(folder / "x.npy", x)
    return folder, x


def lines(path):
    return [line.split(",") for line in path.read_text().splitlines()]


@pytest.mark.parametrize("student", ["encoded", "alone"])
def test_predictions_by_id(run, student, tmp_path, command):
    folder, x = run
    np.save(tmp_path / "some.npy", x[[7, 0, 299]])
    write(tmp_path, nodes=["id", "user_7", "user_0", "user_299"])
    arguments = ("predict", folder / student, tmp_path / "some.npy", "--nodes", tmp_path / "nodes.csv", "--out")
    assert command(*arguments, tmp_path / "some.csv")[0] == 0
    assert (
        command("predict", folder / student, folder / "x.npy", "--nodes", "all", "--out", tmp_path / "all.csv")[0] == 0
    )
    header, *some = lines(tmp_path / "some.csv")
    every = {name: answer for _, name, *answer in lines(tmp_path / "all.csv")[1:]}
    assert header == ["row", "id", "class", "probability"]
    assert [each[1] for each in some] == ["user_7", "user_0", "user_299"]
    assert len(every) == 300
    for _, name, number, share in some:
        assert (number, float(share)) == (every[name][0], pytest.approx(float(every[name][1]), abs=1e-5))
    assert command(*arguments, tmp_path / "some.parquet")[0] == 0
    assert parquet.read_table(tmp_path / "some.parquet")["id"].to_pylist() == ["user_7", "user_0", "user_299"]


def test_new_nodes_by_the_ids_of_their_neighbors(run, tmp_path, command):
    folder, x = run
    np.save(tmp_path / "new.npy", x[:3])
    write(tmp_path, neighbors=["row,node", "0,user_7", "1,user_9", "0,user_11"], nodes=["-1", "-1", "user_2"])
    out = tmp_path / "by_id.csv"
    arguments = ("predict", folder / "encoded", tmp_path / "new.npy", "--neighbors")
    assert command(*arguments, tmp_path / "neighbors.csv", "--nodes", tmp_path / "nodes.csv", "--out", out)[0] == 0
    np.save(tmp_path / "neighbors.npy", [[0, 7], [1, 9], [0, 11]])
    np.save(tmp_path / "nodes.npy", [-1, -1, 2])
    other = tmp_path / "by_row.csv"
    assert command(*arguments, tmp_path / "neighbors.npy", "--nodes", tmp_path / "nodes.npy", "--out", other)[0] == 0
    assert lines(out) == lines(other)
    assert [each[1] for each in lines(out)] == ["id", "", "", "user_2"]
    for line, message in {
        "0,nobody": "neighbors.csv names 'nobody', expected ids of nodes in",
        f"{2**64},user_7": "neighbors.csv holds something else than whole numbers before its ids",
    }.items():
        write(tmp_path, neighbors=[line])
        status, _, err = command(*arguments, tmp_path / "neighbors.csv", "--out", out)
        assert status == 2
        assert message in err


def test_a_list_of_ids_that_is_cut_short(run, tmp_path, command):
    folder, _ = run
    shutil.copytree(folder / "encoded", tmp_path / "cut")
    text = (tmp_path / "cut" / "node_ids.csv").read_text()
    (tmp_path / "cut" / "node_ids.csv").write_text(text[: len(text) // 2])
    for inputs in ([folder / "x.npy", "--nodes", "all"], ["--graph", folder / "graph"]):
        status, _, err = command("predict", tmp_path / "cut", *inputs, "--out", tmp_path / "out.csv")
        assert status == 2
        assert re.search(r"node_ids\.csv has \d+ ids, and the graph of the run 300 nodes; restore the run folder", err)
