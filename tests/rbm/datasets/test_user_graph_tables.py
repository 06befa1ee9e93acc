"""Users' graphs as tables (CSV and Parquet): faults have their own message, and valid variants are read."""

import re

import numpy as np
import pytest
from faulty_graphs import parts, write_folder, write_npz

from rbm.datasets import load_graph


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "1,2\n3\n4,5,6\n7,8\n9,1\n2,3\n", "lines 1 to 6 do not all hold 2 numbers"),
        ("edge_index.csv", "0 1\n2\n3 4 5\n", "lines 1 to 3 do not all hold 2 numbers"),
        ("edge_index.csv", "0,1\n,2,\n", "lines 1 to 2 do not all hold 2 numbers"),
        ("edge_index.csv", "from,to\n0,1\n\n2,3\n", "lines 2 to 4 do not all hold 2 numbers"),
        ("edge_index.csv", "from,to\n0,one\n", "line 2 is '0,one', expected numbers between commas, blanks or"),
        ("edge_index.csv", "0,1,1\n2,3,1\n", r"edge_index\.csv has 3 columns, expected two, from and to"),
        ("y.csv", "class\n\n0\n1\n0\n1\n", "line 2 is empty, expected numbers; remove it, or write the missing row"),
        ("y.csv", "\nclass\n0\n1\n0\n1\n", "line 1 is empty, expected numbers; remove it"),
        ("y.csv", "0\n1\n\n0\n1\n", "do not all hold 1 numbers: line 3 is empty"),
        ("x.csv", "1,2,\n" * 6, "line 1 holds 2 commas, expected 1 between 2 numbers; remove the comma at its end"),
        ("x.csv", "1,2\n" * 5 + "3 4\n", "line 6 holds 0 commas, expected 1 between 2 numbers"),
        ("y.csv", "0\n1 0\n\n1\n0\n1\n", "lines 1 to 6 do not all hold 1 numbers"),
        ("y.csv", "y\n" + "True\n" * 6, "line 2 is 'True', expected numbers between commas, blanks or tabs"),
        ("edge_index.csv", "0;1\n2;3\n", "line 2 is '2;3', expected numbers between commas, blanks or tabs"),
        # As pandas writes tables by default: with an index, which would be read as a feature, and with numbered
        # columns, which would be read as a node.
        ("x.csv", ",a,b\n" + "0,1,2\n" * 6, "line 1 begins with a comma, .* write the table with index=False"),
        ("x.csv", ",0,1\n" + "0,1,2\n" * 6, "line 1 begins with a comma, .* write the table with index=False"),
        ("x.csv", "0,1,2\n" + "3,1,2\n" * 6, "line 1 counts 0, 1, 2 to 2, .* write the table with header=False"),
        ("x.csv", "0,1\n" + "3.0,1.0\n" * 6, "line 1 counts 0, 1, as pandas .* write the table with header=False"),
        (
            "y.csv",
            "0\n" + "1\n" * 6,
            r"y has shape \[7\], expected \[6\], .*header of pandas\? write it with header=False",
        ),
    ],
)
def test_ragged_and_other_tables(tmp_path, name, text, message):
    write_folder(tmp_path, **{name.removesuffix(".csv"): None})
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"dataset: .*{re.escape(name)} .*{message}|{message}"):
        load_graph(tmp_path)


def test_lists_beside_numbers(tmp_path):
    """A column of embeddings counts as that many features, as in a table with ids and in the features of predict."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    write_folder(tmp_path, x=None)
    table = {"age": [*range(6)], "embedding": [[0.5, -row] for row in range(6)], "new": [True, False] * 3}
    parquet.write_table(pyarrow.table(table), tmp_path / "x.parquet")
    assert load_graph(tmp_path).x.tolist() == [[row, 0.5, -row, row % 2 == 0] for row in range(6)]


def test_logits_of_a_single_class(tmp_path):
    folder = write_folder(tmp_path, y=np.zeros(6, dtype=np.int64), teacher_logits=None)
    (folder / "logits.csv").write_text("0.5\n" * 6)
    assert load_graph(folder).teacher_logits.tolist() == [[0.5]] * 6


@pytest.mark.parametrize("header", ["dose 0.5 mg,n", "NA,x", "0,x", "?\tx", "0.5 1.5 a", "2020_01,2020_02"])
def test_names_with_numbers_in_them_are_a_header(tmp_path, header):
    write_folder(tmp_path, x=None)
    separator = "," if "," in header else "\t"
    (tmp_path / "x.csv").write_text("\n".join([header, *[f"1{separator}2"] * 6]))
    assert load_graph(tmp_path).x.shape == (6, 2)


@pytest.mark.parametrize(
    "text", ["0\r\n1\r\n0\r\n1\r\n0\r\n1", "\ufeff0\n1\n0\n1\n0\n1\n\n", "\ufeffy\n0\n1\n0\n1\n0\n1"]
)
def test_tables_as_spreadsheets_write_them(tmp_path, text):
    write_folder(tmp_path, y=None)
    (tmp_path / "y.csv").write_bytes(text.encode())
    assert load_graph(tmp_path).y.tolist() == [0, 1] * 3


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"name": ["a"] * 6, "value": [1.0] * 6}, "has the column 'name', which holds no numbers; drop it"),
        ({"x": [[1.0, 2.0]] * 5 + [[1.0]]}, ".*its column 'x' has lists of unlike length"),
        ({}, "has no columns"),
        (
            {f"f{i}": [1.0] * 6 for i in sorted(range(11), key=str)},
            ".*its column 'f2' comes after 'f10', expected numbered columns in the order of their numbers",
        ),
        ({"2": [1.0] * 6, "1": [1.0] * 6}, ".*its column '1' comes after '2', expected numbered columns"),
        (
            {"a": [1.0] * 6, "__index_level_0__": range(6)},
            ".*its column '__index_level_0__' is an index of rows, as pandas",
        ),
    ],
)
def test_bad_parquet(tmp_path, columns, message):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    write_folder(tmp_path, x=None)
    parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=rf"x\.parquet {message}"):
        load_graph(tmp_path)


@pytest.mark.parametrize("name", ["x", "edge_index", "y"])
def test_an_index_of_pandas_in_parquet_is_no_column(tmp_path, name):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    folder = write_folder(tmp_path, **{name: None})
    value = parts()[name]
    table = pandas.DataFrame(value.T if name == "edge_index" else value)
    for changed, index in (
        (table.iloc[[1, 0, *range(2, len(table))]], "__index_level_0__"),
        (table.set_index(pandas.Index([7, 3, 5, 4, 6, 2][: len(table)], name="node")), "node"),
    ):
        changed.to_parquet(folder / f"{name}.parquet")
        message = rf"{name}\.parquet .*its column '{index}' is an index of rows, .* write the table with index=False"
        with pytest.raises(ValueError, match=message):
            load_graph(folder)
    # The numbered columns are not read as a row, and the range index is not read as a column.
    table.to_parquet(folder / f"{name}.parquet")
    assert np.array_equal(load_graph(folder)[name], value)


@pytest.mark.parametrize("name", ["x", "logits"])
def test_an_index_without_a_header_is_noticed(tmp_path, caplog, name):
    """As ``to_csv(FILE, header=False)`` writes it. It cannot be told from numbers that mean something."""
    part = {"x": "x", "logits": "teacher_logits"}[name]
    folder = write_folder(tmp_path, **({"x": None} if name == "x" else {}))
    (folder / f"{name}.csv").write_text("".join(f"{row},0.5,{-row}\n" for row in range(6)))
    assert load_graph(folder)[part].shape == (6, 3)
    assert f", {part} has the numbers of the rows, 0, 1, 2 and so on, as its first column." in caplog.text
    caplog.clear()
    (folder / f"{name}.csv").write_text("".join(f"{row % 5},0.5,{-row}\n" for row in range(6)))
    load_graph(folder)
    assert "the numbers of the rows" not in caplog.text


def test_labels_as_names(tmp_path):
    with pytest.raises(
        ValueError, match=r"y is <U1, expected an array of numbers; names become numbers by numpy\.unique"
    ):
        load_graph(write_npz(tmp_path, y=np.array(["a", "b"] * 3)))
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"y": ["a", "b"] * 3}), write_folder(tmp_path, y=None) / "y.parquet")
    with pytest.raises(ValueError, match=r"column 'y', which holds no numbers; names become numbers by numpy\.unique"):
        load_graph(tmp_path)


def test_labels_with_a_column_of_ids_of_another_name(tmp_path):
    (write_folder(tmp_path, y=None) / "y.csv").write_text("user,class\nu0,1\nu1,0")
    with pytest.raises(
        ValueError, match=r"line 2 is 'u0,1', expected numbers .*; a column of the nodes' ids is called"
    ):
        load_graph(tmp_path)


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("part", ["y", "logits"])
def test_ids_beside_numbers_are_refused_if_the_features_have_none(tmp_path, part, form):
    """Rows may come in another order, and the ids would be the logits of a class."""
    folder = write_folder(tmp_path, **({"y": None} if part == "y" else {}))
    table = {"id": [*range(6)][::-1], **({"y": [0, 1] * 3} if part == "y" else {"a": [0.0] * 6, "b": [1.0] * 6})}
    if form == "csv":
        lines = [table, *zip(*table.values(), strict=True)]
        (folder / f"{part}.csv").write_text("\n".join(",".join(map(str, line)) for line in lines))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(table), folder / f"{part}.parquet")
    with pytest.raises(
        ValueError, match=rf"{part}\.{form} has ids in its column 'id', expected a column of ids in x too"
    ):
        load_graph(folder)


def test_two_numbered_columns_of_whole_numbers_are_an_edge(tmp_path):
    write_folder(tmp_path, edge_index=None)
    (tmp_path / "edge_index.csv").write_text("0,1\n1,2\n")
    assert load_graph(tmp_path).edge_index.tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_columns_of_masks_in_another_order_are_refused(tmp_path, form):
    folder = write_folder(tmp_path, train_mask=None, val_mask=None, test_mask=None)
    rows = [(int(node < 2), int(node >= 4), int(2 <= node < 4)) for node in range(6)]
    for names, wrong in ((["train", "test_mask", "valid"], True), (["training", "val", "test"], False)):
        if form == "csv":
            lines = [",".join(names), *(",".join(map(str, row)) for row in rows)]
            (folder / "masks.csv").write_text("\n".join(lines))
        else:
            pyarrow = pytest.importorskip("pyarrow")
            parquet = pytest.importorskip("pyarrow.parquet")
            columns = zip(*rows, strict=True)
            parquet.write_table(pyarrow.table(dict(zip(names, columns, strict=True))), folder / "masks.parquet")
        if wrong:
            with pytest.raises(ValueError, match=rf"masks\.{form} has columns in the order train, test, val, expected"):
                load_graph(folder)
        else:
            assert load_graph(folder).val_mask.tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_columns_of_edges_in_another_order_are_refused(tmp_path, form):
    """A directed graph would be read with each edge reversed."""
    folder, edges = write_folder(tmp_path, edge_index=None), [[0, 1, 2], [1, 2, 3]]
    for names, wrong in ((["target", "sourceId"], True), (["src", "dst"], False), (["top", "front"], False)):
        if form == "csv":
            (folder / "edges.csv").write_text("\n".join([",".join(names), "0,1", "1,2", "2,3"]))
        else:
            pyarrow = pytest.importorskip("pyarrow")
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.table(dict(zip(names, edges, strict=True))), folder / "edges.parquet")
        if wrong:
            with pytest.raises(ValueError, match=rf"edges\.{form} has columns in the order to, from, expected from"):
                load_graph(folder)
        else:
            assert load_graph(folder).edge_index.tolist() == edges


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\r1,2\r3,4\r", "line 1 has a carriage return inside, .*; save the file with the line ends of Unix"),
        ("a" * 200_000 + "\n1\n", "line 1: field larger than"),
    ],
)
def test_a_first_line_without_fields(tmp_path, text, message):
    (write_folder(tmp_path, x=None) / "x.csv").write_text(text, newline="")
    with pytest.raises(ValueError, match=rf"dataset: .*x\.csv is no table: {message}"):
        load_graph(tmp_path)
