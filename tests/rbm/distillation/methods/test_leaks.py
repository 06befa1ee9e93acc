"""No method and no teacher learns what it must not see: test labels, unseen nodes, and validation labels in a loss."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

import rbm
from rbm.config import Config
from rbm.config.tree import parse_assignments
from rbm.datasets.splits import split_graph
from rbm.distillation.registry import METHODS
from rbm.teachers import TEACHERS
from rbm.training.run_folder import read_metrics

EPOCHS = 6
TRAINED = (
    *("teacher", "mlp", "rbm", "moe", "glnn", "krd", "nosmog", "cohop", "hgmd", "tined", "tined_plus", "simmlp"),
    *("vqgraph", "vqgraph.tokenizer", "sign", "trees"),
)
SHORT = {f"{section}.max_epochs": EPOCHS for section in TRAINED} | {
    "rbm.pretrain_epochs": 2,
    "moe.pretrain_epochs": 2,
    "reliability.update_start_epoch": 2,
    "vqgraph.tokenizer.codebook_size": 20,
    "encoding.label_propagation": "true",
    "attention.label_input": "true",
}
UNSEEN = 0.4


@pytest.fixture
def graph() -> Data:
    """120 nodes in three classes that a few epochs tell apart, but not without mistakes; ten nodes are in no mask."""
    labels = torch.arange(120) % 3
    same = 3 * torch.randint(0, 40, (2, 240)) + torch.randint(0, 3, (1, 240))
    edges = torch.cat([same, torch.randint(0, 120, (2, 60))], dim=1)
    position = torch.randperm(120)
    return Data(
        x=torch.randn(120, 12) + 1.5 * torch.nn.functional.one_hot(labels, 12),
        edge_index=torch.cat([edges, edges.flip(0)], dim=1).unique(dim=1),
        y=labels,
        train_mask=position < 20,
        val_mask=(position >= 20) & (position < 55),
        test_mask=(position >= 55) & (position < 110),
        num_classes=3,
    )


@pytest.fixture
def short(quick) -> Config:
    return quick.updated(parse_assignments([f"{name}={value}" for name, value in SHORT.items()]))


def relabelled(data: Data, nodes: Tensor) -> Data:
    """The graph with another class for each node of a mask."""
    other = data.clone()
    other.y = torch.where(nodes, (data.y + 1 + torch.arange(data.num_nodes) % 2) % 3, data.y)
    return other


def with_other_unseen_nodes(data: Data) -> Data:
    """The graph with other features and edges of the nodes that the inductive setting hides."""
    unseen = split_graph(data, "inductive", unseen_fraction=UNSEEN).unseen_nodes
    other, hidden = data.clone(), torch.zeros(data.num_nodes, dtype=torch.bool)
    hidden[unseen] = True
    other.x[unseen] = 5.0 * torch.randn(len(unseen), data.num_features)
    left = data.edge_index[:, ~hidden[data.edge_index].any(0)]
    ends = unseen[torch.randint(0, len(unseen), (120,))]
    others = torch.randint(0, data.num_nodes, (120,))
    new = torch.cat([torch.stack([ends, others]), torch.stack([others, ends])[:, :80]], dim=1)
    other.edge_index = torch.cat([new[:, :100], left, new[:, 100:]], dim=1)
    return other


def facts(result: rbm.Distillation) -> dict[str, Any]:
    """All that a run trained and chose: weights, what observed nodes were given, and results but those on test nodes.

    A student's own logits of observed nodes follow from its weights and encodings. The teacher's on the whole graph do
    not: they change with unseen neighbours, and no student learns them.
    """
    found: dict[str, Any] = {"verdict": result.summary["verdict"]}
    models = {"teacher": result.teacher, **result.students}
    for name, model in models.items():
        found |= {f"{name}.{part}": tensor for part, tensor in model.state_dict().items()}
        scores = result.summary[name].items()
        found |= {f"{name} {key}": value for key, value in scores if not key.startswith("test_")}
    for name, encodings in result.encodings.items():
        if encodings is not None:
            found[f"{name} encodings"] = encodings.observed
    if result.split.setting == "transductive":
        found["teacher logits"] = result.teacher_logits
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    assert before.keys() == after.keys()
    pairs = {name: (value, after[name]) for name, value in before.items()}
    return [name for name, (a, b) in pairs.items() if not (torch.equal(a, b) if isinstance(a, Tensor) else a == b)]


def distilled(data: Data, config: Config, teacher: str, methods: list[str], **options: Any) -> rbm.Distillation:
    options = {"measure_latency": False, "unseen_fraction": UNSEEN} | options
    return rbm.distill(data, teacher, config=config, methods=methods, **options)


CASES = [("sage", list(METHODS)), *((teacher, ["krd"]) for teacher in TEACHERS if teacher != "sage")]


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize(("teacher", "methods"), CASES, ids=[teacher for teacher, _ in CASES])
def test_test_labels_and_unseen_nodes_change_nothing(graph, short, setting, teacher, methods):
    config = short.updated({"setting": setting})
    before = distilled(graph, config, teacher, methods)
    other = relabelled(graph, ~graph.train_mask & ~graph.val_mask)
    if setting == "inductive":
        other = with_other_unseen_nodes(other)
    after = distilled(other, config, teacher, methods)
    assert differences(facts(before), facts(after)) == []
    models = ("teacher", *after.students)
    scores = [[result.summary[name]["test_accuracy"] for name in models] for result in (before, after)]
    assert scores[0] != scores[1], "or the changes would mean little"


@pytest.mark.parametrize(("teacher", "methods"), CASES, ids=[teacher for teacher, _ in CASES])
def test_validation_labels_are_in_no_loss(graph, short, tmp_path, teacher, methods):
    """They choose the epoch, whether neighbours and teacher are trusted, and CoHOp's smoothing: all fixed here."""
    last = {f"{section}.min_epochs": EPOCHS for section in TRAINED} | {"cohop.rounds": 1}
    last |= {"distill.neighbors": "true", "distill.source": "teacher"}
    config = short.updated(parse_assignments([f"{name}={value}" for name, value in last.items()]))
    losses = []
    for name, data in (("before", graph), ("after", relabelled(graph, graph.val_mask))):
        distilled(data, config, teacher, methods, folder=tmp_path / name)
        records = read_metrics(tmp_path / name)
        losses.append([(record["phase"], record["epoch"], record["loss"]) for record in records])
    assert losses[0] == losses[1]
    assert {"labels", "krd"} <= {phase for phase, _, _ in losses[0]}
