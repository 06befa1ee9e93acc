"""Graphs larger than memory: features stay in their file, and sums and predictions are computed in chunks."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import rbm
from benchmarks import large_graph
from rbm.config import Config
from rbm.datasets import user_graph as own
from rbm.datasets.splits import split_graph
from rbm.distillation import soft_targets
from rbm.distillation.methods.rbm import RbMTrainer
from rbm.distillation.soft_targets import (
    LogProbabilities,
    Neighborhood,
    SoftTargets,
    teacher_log_probabilities,
    weigh_pairs,
)
from rbm.nn import students
from rbm.nn.half_rows import HalfPrecisionRows
from rbm.nn.kmeans_init import initialize_memory
from rbm.nn.students import predict
from rbm.teachers.outputs import TeacherOutputs, outputs_from_logits
from rbm.utils import chunks
from rbm.utils.chunks import rows_not_finite

PAGE = Path(large_graph.__file__).parent.parent / "docs" / "scale.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
SMALL = {
    "distill": {"batch_size": 64, "step_per_batch": True, "shuffle": True},
    "encoding": {"deepwalk": False, "label_propagation": True},
    "rbm": {"hidden_channels": 8, "num_experts": 3, "top_k": 2, "pretrain_epochs": 0, "kmeans_max_rows": 100},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The benchmark's graph with 239 nodes, with limits lowered so that it counts as large."""
    monkeypatch.setattr(own, "MIN_STORED_NUMEL", 1)
    large_graph.write_graph(tmp_path, 2**13 + 2**11)
    return tmp_path


def test_large_features_stay_in_their_file(folder, monkeypatch):
    data = rbm.load_graph(folder)
    assert data.x.dtype == torch.float16
    if Path("/proc/self/maps").exists():
        assert str(folder / "x.npy") in Path("/proc/self/maps").read_text()
    on_disk = torch.from_numpy(np.load(folder / "x.npy"))
    assert torch.equal(data.x, on_disk)
    monkeypatch.undo()
    assert rbm.load_graph(folder).x.dtype == torch.float32, "small ones are what everyone's code takes"


def test_stored_rows_give_what_their_float32_copy_gives(folder):
    """A whole run with encodings, for a student and a teacher."""
    stored = rbm.load_graph(folder)
    copied = stored.clone()
    copied.x = stored.x.float()
    config = Config().updated({**SMALL, "rbm": {**SMALL["rbm"], "max_epochs": 3}, "teacher": {"max_epochs": 3}})
    options = {"config": config, "methods": ("mlp", "krd", "rbm"), "measure_latency": False}
    options["config"] = config.updated({"mlp": {"max_epochs": 2}, "krd": {"max_epochs": 2}})
    one, other = (rbm.distill(data, "sage", **options) for data in (stored, copied))
    assert one.summary == other.summary
    assert isinstance(one.student_inputs("rbm"), HalfPrecisionRows)
    for name, value in one.student.state_dict().items():
        assert torch.equal(value, other.student.state_dict()[name]), name


def test_a_batch_reads_its_rows_alone():
    class Counting:
        shape, device, read = torch.Size((10, 2)), torch.device("cpu"), 0

        def __getitem__(self, index):
            self.read += len(index)
            return torch.zeros(len(index), 2, dtype=torch.float16)

    matrix = Counting()
    rows = HalfPrecisionRows(matrix, torch.arange(10.0)[:, None])
    taken = rows[torch.tensor([7, 1])]
    assert matrix.read == 2
    assert taken.dtype == torch.float32
    assert taken[:, 2].tolist() == [7, 1]
    assert rows.shape == (10, 3)


def test_targets_in_chunks_have_the_same_bits(monkeypatch):
    edges = torch.randint(0, 50, (2, 300))
    graph, logs = Neighborhood(edges, 50), torch.randn(50, 4).log_softmax(-1)
    pairs = weigh_pairs(graph, torch.rand(50), mean="nodes", draw="expectation")
    whole = SoftTargets.of(pairs, graph, logs)
    monkeypatch.setattr(soft_targets, "_CHUNK_NODES", 7)
    chunked = SoftTargets.of(pairs, graph, logs)
    torch.testing.assert_close(chunked.mass, whole.mass, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(chunked.constant, whole.constant, rtol=1e-6, atol=1e-9)


def test_neighbours_in_chunks_of_edges_and_nodes_are_those_of_one_sort(monkeypatch):
    edges = torch.randint(0, 50, (2, 300))
    edges[:, 295:] = 49  # only self-loops at the end: the last chunk has no edge
    kept = edges[:, edges[0] != edges[1]]
    order = torch.from_numpy(np.argsort(kept[1].numpy(), kind="stable"))
    weights = torch.rand(kept.shape[1])
    sums = torch.zeros(50).index_add_(0, kept[1][order], weights)
    monkeypatch.setattr(soft_targets, "_CHUNK_EDGES", 37)
    monkeypatch.setattr(soft_targets, "_CHUNK_NODES", 7)
    graph = Neighborhood(edges, 50)
    assert torch.equal(graph.sources, kept[0][order])
    assert torch.equal(graph.targets, kept[1][order])
    assert torch.equal(graph.crow[1:], torch.bincount(kept[1], minlength=50).cumsum(0))
    torch.testing.assert_close(graph.sums(weights), sums)


@pytest.mark.parametrize("mode", ["softmax", "scaled_log_probs"])
def test_large_tables_of_targets_are_made_in_blocks_of_classes(monkeypatch, mode):
    graph, logits = Neighborhood(torch.randint(0, 50, (2, 300)), 50), torch.randn(50, 9)
    logits[3, :8] = -1e4  # excluded classes
    pairs = weigh_pairs(graph, torch.rand(50), mean="nodes", draw="expectation")
    table = teacher_log_probabilities(logits, 0.7, mode)
    whole = SoftTargets.of(pairs, graph, table)
    monkeypatch.setattr(soft_targets, "TABLE_BYTES", 0)
    later = teacher_log_probabilities(logits, 0.7, mode)
    assert isinstance(table, torch.Tensor)
    assert isinstance(later, LogProbabilities)
    blocks = SoftTargets.of(pairs, graph, later)
    torch.testing.assert_close(blocks.mass, whole.mass)
    torch.testing.assert_close(blocks.constant, whole.constant)
    assert torch.equal(later[torch.tensor([4, 1])], table[[4, 1]])


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_large_graphs_are_evaluated_without_a_table_of_logits(folder, monkeypatch, setting):
    """Accuracies and the learned exponent equal those from a table of logits, in either setting."""
    data = rbm.load_graph(folder)
    config = Config().updated(SMALL | {"reliability": {"update_start_epoch": 0, "power_momentum": 0.0}})
    split = split_graph(data, setting)
    outputs = outputs_from_logits(data.teacher_logits, split)
    monkeypatch.setattr(TeacherOutputs, "entropy_change", lambda self, config, seed: self.soft_labels.softmax(-1)[:, 0])
    found, tables = [], []
    for limit in (soft_targets.TABLE_BYTES, 0):
        monkeypatch.setattr(soft_targets, "TABLE_BYTES", limit)
        torch.manual_seed(0)
        student = rbm.RbMStudent.from_config(config.rbm, in_channels=data.num_features, out_channels=data.num_classes)
        trainer = RbMTrainer(student, split, outputs, config)
        monkeypatch.setattr(trainer, "all_logits", lambda of=trainer.all_logits: tables.append(1) or of())
        trainer.begin_epoch(0)
        student.eval()
        accuracies = trainer.evaluate()
        found.append((accuracies, trainer.reliability.power))
    assert found[0] == found[1]
    assert found[0][1] != 1.0
    assert len(tables) == 1


def test_rows_that_are_not_finite_are_found_in_any_chunk(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 4)
    table = torch.rand(10, 3).half()
    assert not len(rows_not_finite(table))
    table[3, 1], table[9, 2], table[8, 0] = float("nan"), float("inf"), float("-inf")
    assert rows_not_finite(table).tolist() == [3, 8, 9]


def test_predictions_in_chunks(folder, monkeypatch):
    data = rbm.load_graph(folder)
    config = Config().updated(SMALL)
    student = rbm.RbMStudent.from_config(config.rbm, in_channels=data.num_features, out_channels=data.num_classes)
    split = split_graph(data)
    trainer = RbMTrainer(student, split, outputs_from_logits(data.teacher_logits, split), config)
    student.pretraining = False
    student.eval()
    whole, forwards = predict(student, trainer.full_x).detach(), []
    expected = trainer.evaluate()
    monkeypatch.setattr(students, "CHUNK_ROWS", 100)
    student.register_forward_pre_hook(lambda module, arguments: forwards.append(len(arguments[0])))
    torch.testing.assert_close(predict(student, trainer.full_x).detach(), whole)
    assert forwards == [100, 100, 39]
    assert trainer.evaluate() == expected
    torch.testing.assert_close(predict(student, trainer.full_x, slice(30, 150)).detach(), whole[30:150])
    assert predict(student, trainer.full_x, slice(30, 30)).shape == (0, 47)


def test_memory_is_placed_by_a_sample(monkeypatch):
    """Rows outside the sample are never read."""
    drawn = []

    class Noting(HalfPrecisionRows):
        def __getitem__(self, index):
            drawn.append(index)
            return super().__getitem__(index)

    student = rbm.RbMStudent(8, 6, 3, num_experts=3, top_k=2)
    initialize_memory(student, Noting(torch.randn(500, 8).half()), max_rows=60)
    ((rows,),) = (drawn,)
    assert len(rows) == len(rows.unique()) == 60
    assert rows.max() > 60


def test_the_benchmark_measures_every_stage(folder, tmp_path):
    records = large_graph.measure(folder)
    assert [record["stage"] for record in records] == [
        *("load and check", "neighbours", "soft targets", "K-means", "epoch", "evaluation")
    ]
    assert {record["nodes"] for record in records} == {large_graph.SHAPES["ogbn-products"].nodes // (2**13 + 2**11)}
    rows = [*records, *({**record, "nodes": 1000} for record in records)]
    table = large_graph.costs(rows, large_graph.SHAPES["ogbn-products"]).splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| 239", "| 1,000", "| 2,449,029, model"]
    picture = tmp_path / "large.png"
    large_graph.plot(rows, picture)
    assert picture.stat().st_size > 1000


def test_the_page_shows_the_committed_rows():
    root = Path(large_graph.__file__).parent
    with (root / "results" / "large_graph.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["fraction"] for row in rows} == {"1/16", "1/8", "1/4", "1/2", "1/1"}
    assert max(int(row["peak_mib"]) for row in rows) < 12 * 1024
    assert large_graph.markdown(rows) in PAGE.read_text()
    with (root / "results" / "papers100m.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert max(int(row["peak_mib"]) for row in rows) < 24 * 1024
    assert large_graph.markdown(rows) in PAGE.read_text()
    assert large_graph.costs(rows, large_graph.SHAPES["ogbn-papers100M"]) in PAGE.read_text()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_python_blocks_of_the_page(block):
    exec(compile(block, str(PAGE), "exec"), {})
