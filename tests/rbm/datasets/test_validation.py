"""Every fault of a graph has its own error message."""

import re

import numpy as np
import pytest
import torch
import torch_geometric
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.utils import to_torch_csr_tensor

import rbm
from rbm.datasets import num_classes, validate_data
from rbm.datasets.validation import (
    warn_of_edge_weights,
    warn_of_labels_in_features,
    warn_of_missing_edges,
    warn_of_scale,
    warn_of_untaught_classes,
)


def graph(**changes) -> Data:
    data = Data(
        x=torch.ones(6, 2),
        edge_index=torch.tensor([[0, 1, 2, 5], [1, 2, 0, 4]]),
        y=torch.tensor([0, 1, 2, 0, 1, -1]),
        train_mask=torch.tensor([1, 1, 0, 0, 0, 0], dtype=torch.bool),
        val_mask=torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool),
        test_mask=torch.tensor([0, 0, 0, 1, 1, 0], dtype=torch.bool),
    )
    for key, value in changes.items():
        data[key] = value
    return data


def test_a_directed_graph_with_an_unlabelled_node_outside_the_masks_is_fine():
    validate_data(graph())
    validate_data(graph(num_classes=3))
    validate_data(graph(edge_index=torch.empty(2, 0, dtype=torch.int64)))


@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_features_beyond_the_usual_size_are_reported(caplog, layout):
    x = torch.randn(50, 4)
    x[:, 2] *= 1e6

    def told(x) -> str:
        caplog.clear()
        warn_of_scale(x if layout == "dense" else x.to_sparse_csr())
        return caplog.text

    assert "1 of 4 features have absolute values above 1000 (column 2), up to" in told(x)
    assert "1 of 4 features have absolute values above 1000 (column 2), up to" in told(-x.abs())
    assert "no absolute value exceeds 0.0001" in told(torch.rand(50, 4) * 1e-4)
    for usual in (torch.randn(50, 4) * 100, torch.eye(50, 4), torch.zeros(50, 4), torch.full((50, 4), 0.002)):
        assert told(usual) == ""


@pytest.mark.parametrize("nodes", [60, 3000])  # the second is more than are drawn first
def test_columns_that_tell_the_class_are_reported(caplog, nodes):
    y = torch.randint(3, (nodes,))
    y[5] = -1
    rows = torch.randn(nodes, 6)
    rows[:, 4] = 1

    def told(x) -> str:
        caplog.clear()
        warn_of_labels_in_features(Data(x=x, y=y))
        return caplog.text

    assert told(rows) == ""
    left = rows.clone()
    left[:, 1] = 7.0 - y
    assert "data.x: column 1 has one value per class, so that it tells the class" in told(left)
    one_hot = torch.cat([rows, torch.nn.functional.one_hot(y.clamp_min(0)).float()], dim=1)
    assert "columns 6, 7, 8 have one value per class" in told(one_hot)
    one_hot[9, 6:] = 0.5  # one node does not fit
    assert told(one_hot) == ""
    assert told(left.to_sparse_csr()) == ""  # a table that was read is dense
    y[:4] = 3
    of_few = torch.cat([rows, (y == 3).float()[:, None]], dim=1)  # a word of all four nodes of a small class
    assert told(of_few) == ""


def test_classes_without_a_training_node_are_reported(caplog):
    warn_of_untaught_classes(graph())  # only a validation node has class 2
    assert "no training node has class 2, so no model learns to predict it" in caplog.text
    warn_of_untaught_classes(graph(y=torch.zeros(6, dtype=torch.int64)))
    assert "every labelled node has class 0" in caplog.text
    caplog.clear()
    warn_of_untaught_classes(graph(y=torch.tensor([0, 1, 1, 0, 1, -1]), num_classes=3))
    assert not caplog.text


def test_a_graph_whose_edges_join_no_two_nodes_is_reported(caplog):
    warn_of_missing_edges(graph())
    assert not caplog.text
    for edges in (torch.empty(2, 0, dtype=torch.int64), torch.arange(6).expand(2, -1)):
        caplog.clear()
        warn_of_missing_edges(graph(edge_index=edges))
        assert "no edge joins two nodes" in caplog.text


def test_numbers_of_edges_are_reported_as_not_used(caplog):
    warn_of_edge_weights("data", graph().keys())
    assert not caplog.text
    warn_of_edge_weights("data", graph(edge_weight=torch.ones(1), edge_attr=torch.ones(1, 2)).keys())
    assert "data: edge_attr and edge_weight are not used" in caplog.text


def test_a_run_warns_once(caplog, tmp_path):
    few = {"max_epochs": 1}
    config = rbm.Config().updated({"teacher": few, "mlp": few, "encoding": {"deepwalk": False}})
    data = graph(x=torch.full((6, 2), 1e4), edge_attr=torch.ones(4))
    rbm.distill(data, config=config, methods=["mlp"], folder=tmp_path / "run", plots=False)
    assert caplog.text.count("2 of 2 features have absolute values above 1000 (columns 0, 1), up to 1e+04") == 1
    assert caplog.text.count("no training node has class 2") == 1
    assert caplog.text.count("data: edge_attr is not used") == 1


def test_number_of_classes():
    assert num_classes(graph()) == 3
    assert num_classes(graph(num_classes=5)) == 5


def with_value(tensor: torch.Tensor, index, value) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


FAULTS = {
    "no x": ({"x": None}, ValueError, r"data\.x: missing"),
    "x list": ({"x": [[1.0]] * 6}, TypeError, r"data\.x: got list"),
    "x sparse": ({"x": torch.ones(6, 2).to_sparse()}, TypeError, r"data\.x: got a torch\.sparse_coo tensor"),
    "x whole": ({"x": torch.ones(6, 2).long()}, TypeError, r"data\.x: got torch\.int64.*data\.x\.float\(\)"),
    "x double": ({"x": torch.ones(6, 2).double()}, TypeError, r"data\.x: got torch\.float64.*data\.x\.float\(\)"),
    "x bfloat16": ({"x": torch.ones(6, 2).bfloat16()}, TypeError, r"data\.x: got torch\.bfloat16.*data\.x\.float\(\)"),
    "x learned": ({"x": torch.ones(6, 2).requires_grad_()}, ValueError, r"data\.x: requires a gradient.*\.detach\(\)"),
    "x flat": ({"x": torch.ones(6)}, ValueError, r"data\.x: got shape \[6\].*; use data\.x\[:, None\]"),
    "x empty": ({"x": torch.ones(6, 0)}, ValueError, r"data\.x: got shape \[6, 0\]"),
    "x nan": (
        {"x": with_value(torch.ones(6, 2), (4, 1), torch.nan)},
        ValueError,
        r"data\.x: 1 of 6 nodes have NaN or infinite features \(node 4\)",
    ),
    "x inf": (
        {"x": torch.full((6, 2), torch.inf)},
        ValueError,
        r"data\.x: 6 of 6 nodes .*\(node 0, 1, 2, 3, 4, \.\.\.\)",
    ),
    "no edges": ({"edge_index": None}, ValueError, r"data\.edge_index: missing"),
    "edges of PyG": (
        {"edge_index": EdgeIndex(torch.zeros(2, 3, dtype=torch.int64))},
        TypeError,
        r"data\.edge_index: got an EdgeIndex of PyG, .*; use data\.edge_index\.as_tensor\(\)",
    ),
    "other nodes": ({"num_nodes": 7}, ValueError, r"data\.num_nodes: got 7, expected 6, the number of rows of data\.x"),
    "edges int32": (
        {"edge_index": torch.zeros(2, 3, dtype=torch.int32)},
        TypeError,
        r"data\.edge_index: got torch\.int32",
    ),
    "edges turned": (
        {"edge_index": torch.zeros(3, 2, dtype=torch.int64)},
        ValueError,
        r"data\.edge_index: got shape \[3, 2\].*\.t\(\)",
    ),
    "edge too high": (
        {"edge_index": torch.tensor([[0, 1, 2], [1, 6, 0]])},
        ValueError,
        r"data\.edge_index: 1 of 3 edges .*\(edge 1; edge 1 is 1 -> 6\), expected node ids from 0 to 5",
    ),
    "edge negative": ({"edge_index": torch.tensor([[-1], [0]])}, ValueError, r"edge 0 is -1 -> 0"),
    "no y": ({"y": None}, ValueError, r"data\.y: missing"),
    "y float": ({"y": torch.zeros(6)}, TypeError, r"data\.y: got torch\.float32.*\.long\(\)"),
    "y of names": ({"y": list("abcabc")}, TypeError, r"got list, .*names become class numbers by .*unique\(data\.y, "),
    "y of NumPy": ({"y": np.zeros(6, int)}, TypeError, r"data\.y: got ndarray, .*; use torch\.as_tensor\(data\.y\)"),
    "y one-hot": (
        {"y": torch.eye(6, 3)},
        ValueError,
        r"got shape \[6, 3\], .*; use data\.y\.argmax\(1\) of one-hot rows",
    ),
    "x as COO": ({"x": torch.eye(6).to_sparse()}, TypeError, r"torch\.sparse_coo.*; use data\.x\.to_sparse_csr\(\)"),
    "y short": ({"y": torch.zeros(5).long()}, ValueError, r"data\.y: got shape \[5\], expected \[6\]"),
    "y column": ({"y": torch.zeros(6, 1).long()}, ValueError, r"data\.y: got shape \[6, 1\].*squeeze\(1\)"),
    "y unknown in mask": (
        {"y": torch.tensor([0, 1, 2, -1, 1, -1])},
        ValueError,
        r"data\.y: 1 labels are out of range \(node 3; node 3 has -1\)",
    ),
    "y very negative": ({"y": torch.tensor([0, 1, 2, 0, 1, -2])}, ValueError, r"node 5 has -2"),
    "y too high": ({"num_classes": 2}, ValueError, r"\(node 2; node 2 has 2\), expected class numbers from 0 to 1"),
    "unlabelled in validation": (
        {"y": torch.tensor([0, 1, -1, 0, 1, -1])},
        ValueError,
        r"data\.y: 1 labels are out of range \(node 2; node 2 has -1\)",
    ),
    "classes many": ({"num_classes": 2**16 + 1}, ValueError, r"data\.num_classes: got 65537, expected at most 65536"),
    "classes text": ({"num_classes": "3"}, TypeError, r"data\.num_classes: got '3'"),
    "no mask": ({"val_mask": None}, ValueError, r"data\.val_mask: missing, .*set data\.val_mask, or .*RandomNodeSplit"),
    "mask long": (
        {"test_mask": torch.ones(6).long()},
        TypeError,
        r"data\.test_mask: got torch\.int64, .*; use data\.test_mask\.bool\(\)",
    ),
    "mask short": ({"train_mask": torch.ones(4).bool()}, ValueError, r"data\.train_mask: got shape \[4\]"),
    "many splits": (
        {"train_mask": torch.ones(6, 10).bool()},
        ValueError,
        r"got shape \[6, 10\].*choose one of its 10 splits, data\.train_mask\[:, 0\]",
    ),
    "mask empty": ({"val_mask": torch.zeros(6).bool()}, ValueError, r"data\.val_mask: no node is marked"),
    "masks overlap": (
        {"val_mask": torch.tensor([0, 0, 0, 0, 1, 0], dtype=torch.bool)},
        ValueError,
        r"data\.val_mask: 1 nodes are in data\.test_mask as well \(node 4\)",
    ),
    "train in test": (
        {"train_mask": torch.tensor([0, 0, 0, 1, 0, 0], dtype=torch.bool)},
        ValueError,
        r"data\.train_mask: 1 nodes are in data\.test_mask",
    ),
}


def advised(data, match: str):
    """What the message about ``data`` says to use, from the name of the module on."""
    with pytest.raises((TypeError, ValueError), match=match) as caught:
        validate_data(data)
    expression = re.search(r"torch_geometric\..*", str(caught.value))[0]
    return eval(expression, {"torch_geometric": torch_geometric, "data": data})


def test_advice_about_masks_and_adjacencies_works():
    data, whole = graph(), graph()
    data.train_mask = whole.train_mask.nonzero().flatten()
    data.train_mask = advised(data, r"data\.train_mask: got torch\.int64, expected torch\.bool")
    assert torch.equal(data.train_mask, whole.train_mask)

    data.edge_index, data.adj_t = None, to_torch_csr_tensor(whole.edge_index.flip(0), size=(6, 6))
    data.edge_index = advised(data, r"data\.edge_index: missing")
    assert sorted(data.edge_index.T.tolist()) == sorted(whole.edge_index.T.tolist())

    data = graph(x=torch.ones(60, 2), y=torch.arange(60) % 3, train_mask=None)
    validate_data(advised(data, r"data\.train_mask: missing"))


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault):
    changes, error, message = FAULTS[fault]
    with pytest.raises(error, match=message):
        validate_data(graph(**changes))


def test_not_a_graph():
    with pytest.raises(TypeError, match="data: got dict"):
        validate_data({"x": torch.ones(2, 2)})
