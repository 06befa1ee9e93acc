"""Teachers under bfloat16 autocast: what is rounded, what stays float32, and trainings in both ways of an epoch."""

import pytest
import torch

from rbm.config import SETTINGS, Config
from rbm.config.presets import teacher_settings
from rbm.datasets.splits import split_graph
from rbm.teachers import GCN, TEACHERS, GraphSAGE, RevGAT
from rbm.teachers.aggregation import aggregate
from rbm.teachers.labelled import LabelledNodes
from rbm.teachers.prepare import build_configured_teacher
from rbm.teachers.training import build_teacher_trainer
from rbm.training.loop import train_epoch

SHAPE = {"hidden_channels": 16, "max_epochs": 5, "min_epochs": 0}
VARIANTS = {
    "dense": {},
    "sparse": {},
    "deep": {"teacher": {"num_layers": 3, "norm": "layer"}},
    "labels as input": {"attention": {"label_input": True}},
}


def trainer_of(graph, name, setting="transductive", precision="bfloat16", **changes):
    torch.manual_seed(0)
    config = Config().updated(teacher_settings(name)).updated({"teacher": SHAPE | {"name": name}})
    config = config.updated({"precision": precision}).updated(changes)
    split = split_graph(graph, setting, unseen_fraction=0.4)
    return build_teacher_trainer(build_configured_teacher(config, split, 3), split, config)


def course(trainer) -> list[torch.Tensor]:
    """Losses, logits after each epoch, and the parameters at the end."""
    found = []
    for epoch in range(5):
        found += [torch.tensor(train_epoch("teacher", trainer, epoch)), *trainer.logits()]
    return [*found, *(parameter.detach() for parameter in trainer.model.parameters())]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", TEACHERS)
def test_every_teacher_trains(small_graph, name, variant, setting):
    if variant == "sparse":
        small_graph.x = (small_graph.x * (small_graph.x > 0)).to_sparse_csr()
    mixed, plain = (
        course(trainer_of(small_graph, name, setting, precision, **VARIANTS[variant]))
        for precision in ("bfloat16", "float32")
    )
    assert {tensor.dtype for tensor in mixed} == {torch.float32}
    torch.testing.assert_close(mixed[0], plain[0], rtol=0.05, atol=0.05)
    assert name == "label_propagation" or not torch.equal(mixed[1], plain[1]), "or the precision has no effect"


@pytest.mark.parametrize("name", ["sage", "gcn"])
@pytest.mark.parametrize("changes", [{}, {"num_layers": 3}, {"hidden_channels": 8}])
@pytest.mark.parametrize("setting", SETTINGS)
def test_shared_products_change_little(small_graph, monkeypatch, name, changes, setting):
    found = course(trainer := trainer_of(small_graph, name, setting, teacher=changes))
    assert trainer.observed, "or this compares a way with itself"
    monkeypatch.setattr(LabelledNodes, "serves", lambda *_: False)
    expected = course(trainer_of(small_graph, name, setting, teacher=changes))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_evaluation_after_a_change_of_precision_does_not_reuse_the_product(small_graph):
    trainer = trainer_of(small_graph, "sage")
    trainer.model.eval()
    mixed, _ = trainer.logits()
    trainer.precision = "float32"
    plain, _ = trainer.logits()
    expected, _ = trainer_of(small_graph, "sage", precision="float32").logits()
    assert not torch.equal(mixed, plain)
    trainer.observed._known = None
    assert torch.equal(plain, trainer.logits()[0])
    assert plain.shape == expected.shape


@pytest.mark.parametrize("kind", [GraphSAGE, GCN])
@pytest.mark.parametrize("hidden", [4, 32])
def test_sums_over_neighbours_are_float32(small_graph, kind, hidden):
    teacher = kind(12, hidden, 3)
    adjacency = kind.adjacency(small_graph.edge_index, 60)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        summed = aggregate(adjacency, small_graph.x.bfloat16())
        logits = teacher(small_graph.x, adjacency)
    torch.testing.assert_close(summed, adjacency @ small_graph.x.bfloat16().float(), rtol=0, atol=0)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, teacher(small_graph.x, adjacency), rtol=0.05, atol=0.05)


def test_reversible_layers_repeat_a_forward_in_its_precision(small_graph):
    """The backward pass runs outside of autocast and recomputes the blocks."""
    settings = {"num_layers": 4, "heads": 2, "norm": "layer"}
    plain = RevGAT(12, 8, 3, reversible=False, **settings)
    reversible = RevGAT(12, 8, 3, **settings)
    reversible.load_state_dict(plain.state_dict())
    dtypes = []
    for block in reversible.blocks:
        for part in block.convs:
            part.conv.lin.register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
    gradients = []
    for model in (plain, reversible):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(small_graph.x, small_graph.edge_index)
        logits.float().square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert len(dtypes) > 2 * len(reversible.blocks), "or nothing was recomputed"
    assert set(dtypes) == {torch.bfloat16}
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.02 * other.abs().max().item())
