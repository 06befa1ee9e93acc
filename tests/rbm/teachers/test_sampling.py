"""Teachers trained in batches.

PyG's sampler is native code that few machines have. A plain one replaces it here, and PyG's own is tested if installed.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch_geometric.loader
from torch_geometric import typing
from torch_geometric.data import Data

from rbm.config import Config
from rbm.datasets.splits import split_graph
from rbm.distillation.distill import distill
from rbm.experiments.results import config_fingerprint
from rbm.teachers.neighbor_sampling import NeighborBatches
from rbm.teachers.prepare import build_configured_teacher, cached_teacher
from rbm.teachers.training import SampledTrainer, TeacherTrainer, build_teacher_trainer
from rbm.utils.cache import Cache
from rbm.utils.progress import Progress

QUICK = Config().updated(
    {
        "teacher": {"hidden_channels": 16, "max_epochs": 30, "dropout": 0.0, "min_epochs": 0},
        "mlp": {"max_epochs": 3},
        "encoding": {"deepwalk": False},
    }
)


class PlainLoader:
    """The output of PyG's NeighborLoader, drawn in Python: the nodes of the batch first, then those found per hop."""

    def __init__(self, data, num_neighbors, input_nodes, batch_size, shuffle):
        self.edges, self.fan_out, self.nodes = data.edge_index, num_neighbors, input_nodes
        self.batch_size, self.shuffle = batch_size, shuffle

    def __iter__(self):
        order = torch.randperm(len(self.nodes)) if self.shuffle else torch.arange(len(self.nodes))
        for chunk in order.split(self.batch_size):
            yield self.around(self.nodes[chunk])

    def around(self, seeds):
        found, edges, rim = seeds.tolist(), [], seeds.tolist()
        for most in self.fan_out:
            known, new = set(found), []
            for target in rim:
                into = (self.edges[1] == target).nonzero().flatten()
                into = into[torch.randperm(len(into))[: len(into) if most == -1 else most]]
                edges += [(source, target) for source in self.edges[0, into].tolist()]
            for source, _ in edges:
                if source not in known:
                    known.add(source)
                    new.append(source)
            found, rim = found + new, new
        place = {node: position for position, node in enumerate(found)}
        pairs = torch.tensor([[place[a], place[b]] for a, b in edges], dtype=torch.int64).reshape(-1, 2).T
        return Data(n_id=torch.tensor(found), edge_index=pairs, batch_size=len(seeds))


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(torch_geometric.loader, "NeighborLoader", PlainLoader)
    monkeypatch.setattr(typing, "WITH_PYG_LIB", True)


def trained(config, graph, setting="transductive", epochs=6):
    split = split_graph(graph, setting, seed=0)
    torch.manual_seed(0)
    training = build_teacher_trainer(build_configured_teacher(config, split, 3), split, config)
    losses = []
    for epoch in range(epochs):
        training.model.train()
        losses.append(training.train_epoch(epoch))
    return training, losses


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_all_neighbours_of_all_training_nodes_are_a_full_batch(plain, small_graph, setting, layers):
    config = QUICK.updated({"teacher": {"num_layers": layers}})
    whole, losses = trained(config, small_graph, setting)
    sampled, theirs = trained(config.updated({"sampling": {"batch_size": 100, "fan_out": "-1"}}), small_graph, setting)
    assert type(whole) is TeacherTrainer
    assert type(sampled) is SampledTrainer
    assert theirs == pytest.approx(losses, rel=1e-5)
    for mine, other in zip(sampled.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert sampled.evaluate() == whole.evaluate()


def test_sparse_features_give_the_same_batches(plain, small_graph):
    config = QUICK.updated({"sampling": {"batch_size": 4, "fan_out": "3"}})
    _, losses = trained(config, small_graph)
    small_graph.x = small_graph.x.to_sparse_csr()
    assert trained(config, small_graph)[1] == pytest.approx(losses, rel=1e-4)


def test_an_epoch_sees_every_training_node_once_and_few_neighbours(plain, small_graph):
    nodes = small_graph.train_mask.nonzero().flatten()
    config = QUICK.updated({"sampling": {"batch_size": 4, "fan_out": "2,1"}})
    batches = NeighborBatches(small_graph, nodes, config.sampling, num_layers=2)
    samples = list(batches)
    assert [sample.count for sample in samples] == [4, 4, 4, 3]
    seen = torch.cat([sample.nodes[: sample.count] for sample in samples])
    assert seen.sort().values.tolist() == nodes.tolist()
    for sample in samples:
        assert sample.edges.shape[1] <= sample.count * 2 + sample.count * 2
        assert torch.bincount(sample.edges[1], minlength=sample.count)[: sample.count].max() <= 2
        sources, targets = sample.nodes[sample.edges]
        real = set(map(tuple, small_graph.edge_index.T.tolist()))
        assert set(zip(sources.tolist(), targets.tolist(), strict=True)) <= real
    assert {tuple(sample.nodes.tolist()) for sample in samples} != {tuple(sample.nodes.tolist()) for sample in batches}


def test_a_step_a_batch(plain, small_graph):
    training, _ = trained(QUICK.updated({"sampling": {"batch_size": 4}}), small_graph, epochs=3)
    steps = {int(state["step"]) for state in training.optimizer.state.values()}
    assert steps == {3 * math.ceil(15 / 4)}


@pytest.mark.parametrize("teacher", ["sage", "gcn", "gat", "appnp", "mlp"])
def test_a_batch_may_be_one_node_without_neighbours(plain, small_graph, teacher):
    """Regression test: PyTorch's BatchNorm refused a single row, perhaps after hours, when such a node was the last."""
    small_graph.edge_index = torch.empty(2, 0, dtype=torch.int64)
    config = QUICK.updated({"teacher": {"name": teacher, "norm": "batch"}, "sampling": {"batch_size": 14}})
    training, losses = trained(config, small_graph, epochs=2)
    assert training.batches.count == 15
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("teacher", ["sage", "gcn"])
def test_distil_from_a_teacher_of_batches(plain, small_graph, teacher, tmp_path):
    config = QUICK.updated({"teacher": {"name": teacher}, "sampling": {"batch_size": 4, "fan_out": "5"}})
    result = distill(small_graph, config=config, methods=["mlp"], folder=tmp_path / "run", measure_latency=False)
    assert result.summary["teacher"]["test_accuracy"] > 0.8, "a third is chance"
    again = distill(small_graph, config=config, methods=["mlp"], folder=tmp_path / "run", resume=True)
    assert again.summary == result.summary


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sampling": {"batch_size": 8}},
            r"sampler is not installed: pip install pyg-lib, or torch-sparse.*set it to 0",
        ),
        (
            {"sampling": {"batch_size": 8}, "teacher": {"name": "revgat"}},
            "revgat is trained on the whole graph at once",
        ),
        ({"sampling": {"batch_size": 8, "fan_out": "5,5,5"}}, "one for each of teacher.num_layers=2 layers"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is(small_graph, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(typing, "WITH_PYG_LIB", False)
    monkeypatch.setattr(typing, "WITH_TORCH_SPARSE", False)
    with pytest.raises(ValueError, match=message):
        distill(small_graph, config=QUICK.updated(changes), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fan_out", ["", "0", "5,", "-2", "all", "1.5"])
def test_wrong_fan_outs(fan_out):
    with pytest.raises(ValueError, match=r"sampling\.fan_out is .*expected numbers from 1 on, or -1"):
        QUICK.updated({"sampling": {"fan_out": fan_out}})
    with pytest.raises(ValueError, match=r"sampling\.batch_size is -1, expected at least 0"):
        QUICK.updated({"sampling": {"batch_size": -1}})


def test_fan_outs():
    assert replace(QUICK.sampling, fan_out="-1").neighbors(2) == [-1, -1]
    assert replace(QUICK.sampling, fan_out="15, 10,5").neighbors(3) == [15, 10, 5]


def test_results_of_full_batches_keep_their_names(small_graph, tmp_path):
    """A teacher trained in batches has another fingerprint; without batches, unused settings do not change it."""
    idle, batches = (
        QUICK.updated({"sampling": settings}) for settings in ({"fan_out": "3"}, {"fan_out": "3", "batch_size": 8})
    )
    names = [config_fingerprint(config, "rbm") for config in (QUICK, idle, batches)]
    assert names[0] == names[1] != names[2]
    assert config_fingerprint(batches, "cohop") == config_fingerprint(QUICK, "cohop"), "it has no teacher"
    split, trainings = split_graph(small_graph), []
    for config in (QUICK, idle, batches):
        teacher = build_configured_teacher(config, split, 3)
        arguments = (teacher, split, config, 3, Cache(tmp_path))
        cached_teacher(*arguments, lambda config=config: trainings.append(config) or {}, Progress(None))
    assert trainings == [QUICK, batches]


@pytest.mark.skipif(
    not (typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE), reason="needs PyG's sampler (pyg-lib or torch-sparse)"
)
def test_pygs_own_sampler(small_graph):
    whole, losses = trained(QUICK, small_graph)
    sampled, theirs = trained(QUICK.updated({"sampling": {"batch_size": 100, "fan_out": "-1"}}), small_graph)
    assert theirs == pytest.approx(losses, rel=1e-5)
    assert sampled.evaluate() == whole.evaluate()
    nodes = small_graph.train_mask.nonzero().flatten()
    few = NeighborBatches(small_graph, nodes, replace(QUICK.sampling, batch_size=4, fan_out="2"), num_layers=2)
    assert sorted(node for sample in few for node in sample.nodes[: sample.count].tolist()) == nodes.tolist()
