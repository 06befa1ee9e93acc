"""RevGAT and DRGAT in use: trained by name, label inputs without leaks, and the whole distillation."""

import math

import pytest
import torch
from killed_runs import killed_and_resumed
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data

import rbm
from rbm.config import ATTENTION_TEACHERS, Config
from rbm.config.presets import preset_config
from rbm.datasets.splits import GraphSplit, split_graph
from rbm.distillation.task import fit_phase
from rbm.experiments.results import config_fingerprint
from rbm.nn import losses
from rbm.teachers import TEACHERS, AttentionTeacher, LabelInput, Teacher
from rbm.teachers.prepare import build_configured_teacher, cached_teacher, training_labels
from rbm.teachers.training import AttentionTrainer, build_teacher_trainer
from rbm.utils.cache import Cache
from rbm.utils.precision import fast_float32
from rbm.utils.progress import Progress
from rbm.utils.repeatable import deterministic

QUICK = {
    "teacher": {"hidden_channels": 8, "num_layers": 4, "norm": "batch", "max_epochs": 30, "patience": 30},
    "attention": {"warmup_epochs": 10, "input_dropout": 0.1},
    "mlp": {"max_epochs": 15},
    "rbm": {"hidden_channels": 8, "num_experts": 4, "top_k": 2, "max_epochs": 15, "pretrain_epochs": 5},
    "encoding": {"deepwalk": False},
}
WITH_LABELS = {"attention": {"label_input": True}}


@pytest.fixture
def quick() -> Config:
    return Config().updated(QUICK)


def trained(config: Config, split: GraphSplit, classes: int) -> tuple[Teacher, dict]:
    """Train a teacher as :func:`rbm.distill` does: with deterministic kernels for any number of threads."""
    with deterministic():
        torch.manual_seed(config.seed)
        teacher = build_configured_teacher(config, split, classes)
        trainer = build_teacher_trainer(teacher, split, config)
        return teacher, fit_phase("teacher", trainer, config.teacher, None, Progress(None))


def test_registry():
    assert tuple(name for name, kind in TEACHERS.items() if issubclass(kind, AttentionTeacher)) == ATTENTION_TEACHERS


@pytest.mark.parametrize("name", ATTENTION_TEACHERS)
def test_learns_digits(name):
    data = rbm.load_dataset("digits")
    config = preset_config("clean", "digits", teacher=name)
    config = config.updated({"teacher": {"max_epochs": 50, "hidden_channels": 16}, "attention": {"warmup_epochs": 10}})
    assert trained(config, split_graph(data), 10)[1]["val_accuracy"] > 0.8
    few = config.updated({"teacher": {"max_epochs": 8}})
    results = [trained(few, split_graph(data), 10) for _ in range(2)]
    assert results[0][1] == results[1][1]
    for one, other in zip(*(teacher.state_dict().values() for teacher, _ in results), strict=True):
        assert torch.equal(one, other), "the same seed, the same bits"


@pytest.mark.datasets
@pytest.mark.slow
def test_cora_comes_close_to_graphsage(data_root):
    split = split_graph(rbm.load_dataset("cora", data_root))

    def validation(name: str, epochs: int) -> float:
        """GraphSAGE has the same width as the others: the preset's 512 would take most of the time without benefit."""
        config = preset_config("clean", "cora", teacher=name)
        few = {"teacher": {"max_epochs": epochs, "hidden_channels": 32}}
        return trained(config.updated(few), split, 7)[1]["val_accuracy"]

    sage = validation("sage", 150)
    for name in ATTENTION_TEACHERS:
        assert validation(name, 150 if name == "revgat" else 60) > sage - 0.02, name


class Spy(Teacher):
    """Returns the last columns of its input, the labels, and records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.weight = nn.Parameter(torch.ones(()))

    def adjacency(self, edge_index, num_nodes, dtype=torch.float32):
        return edge_index

    def forward(self, x, edge_index):
        self.seen.append(x[:, -3:].clone())
        return (x[:, -3:] + torch.arange(3.0)) * self.weight

    def embed(self, x, edge_index):
        self.seen.append(x[:, -3:].clone())
        return x


def spied(split: GraphSplit, iterations: int = 0) -> tuple[Spy, LabelInput]:
    spy = Spy()
    return spy, LabelInput(spy, training_labels(split), 3, mask_rate=0.3, iterations=iterations)


def test_a_random_part_of_the_training_labels_is_shown_and_the_others_are_asked(small_graph):
    spy, teacher = spied(split_graph(small_graph))
    one_hot, shares = F.one_hot(small_graph.y, 3).float(), []
    for _ in range(200):
        _, asked = teacher.masked_forward(small_graph.x, small_graph.edge_index)
        shown = spy.seen.pop().any(1)
        assert not shown[asked].any()
        assert set(shown.nonzero().flatten().tolist()) | set(asked.tolist()) == set(range(15)), "the training nodes"
        assert len(asked) > 0
        shares.append(float(shown[:15].float().mean()))
    assert sum(shares) / 200 == pytest.approx(0.3, abs=0.03)
    teacher.eval()(small_graph.x, small_graph.edge_index)
    shown = spy.seen.pop()
    assert torch.equal(shown[:15], one_hot[:15]), "all of them in evaluation"
    assert not shown[15:].any()


@pytest.mark.parametrize("iterations", [1, 3])
def test_label_reuse_fills_in_what_the_teacher_found(small_graph, iterations):
    spy, teacher = spied(split_graph(small_graph), iterations)
    teacher.eval()(small_graph.x, small_graph.edge_index)
    assert len(spy.seen) == iterations + 1
    known = F.one_hot(small_graph.y[:15], 3).float()
    expected = torch.zeros(45, 3)
    for shown in spy.seen:
        assert torch.equal(shown[:15], known)
        torch.testing.assert_close(shown[15:], expected)
        expected = (expected + torch.arange(3.0)).softmax(-1)
    assert teacher.embed(small_graph.x, small_graph.edge_index).shape == (60, 15)
    torch.testing.assert_close(spy.seen[-1], spy.seen[iterations])
    assert not spy.seen[-1].requires_grad, "the rounds of reuse have no gradient"


def test_unseen_nodes_and_foreign_rows_show_no_label(small_graph):
    split = split_graph(small_graph, "inductive", unseen_fraction=0.4)
    spy, teacher = spied(split)
    for graph in (split.observed, split.graph):
        teacher.eval()(graph.x, graph.edge_index)
        expected = F.one_hot(graph.y, 3) * graph.train_mask[:, None]
        assert torch.equal(spy.seen[-1], expected.float())
    teacher(small_graph.x[:7], torch.empty(2, 0, dtype=torch.int64))
    assert not spy.seen[-1].any(), "a subgraph"
    assert not teacher.state_dict().keys() - {"teacher.weight"}, "labels belong to the graph"
    with pytest.raises(ValueError, match="two graphs have 5 nodes"):
        LabelInput(spy, [torch.zeros(5), torch.ones(5)], 3)


def test_one_training_node_is_always_asked(small_graph):
    small_graph.train_mask[1:] = False
    _, teacher = spied(split_graph(small_graph))
    for _ in range(20):
        assert teacher.masked_forward(small_graph.x, small_graph.edge_index)[1].tolist() == [0]


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_labels_of_other_nodes_change_nothing(small_graph, quick, setting):
    # Only the last epoch may be selected, since validation labels select the epoch.
    config = quick.updated({"teacher": {"name": "revgat", "min_epochs": 29}, **WITH_LABELS, "setting": setting})
    other = small_graph.clone()
    other.y = torch.where(small_graph.train_mask, small_graph.y, (small_graph.y + 1) % 3)
    answers = []
    for data in (small_graph, other):
        split = split_graph(data, setting, unseen_fraction=0.4)
        teacher, _ = trained(config, split, 3)
        with torch.no_grad():
            answers += [teacher(graph.x, graph.edge_index) for graph in (split.observed, split.graph)]
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(answers[1], answers[3])
    with torch.no_grad():
        teacher.labels_of_60[split.graph.train_mask] = 0
        assert not torch.equal(teacher(data.x, data.edge_index), answers[3]), "training labels do"


def test_recipe(small_graph, quick):
    config = quick.updated({"teacher": {"name": "drgat", "lr": 0.01, "dropout": 0.0}})
    config = config.updated({"attention": {"input_dropout": 0.0, "edge_dropout": 0.0}})
    split = split_graph(small_graph)
    model = build_configured_teacher(config, split, 3)
    trainer = build_teacher_trainer(model, split, config)
    assert isinstance(trainer, AttentionTrainer)
    assert isinstance(trainer.optimizer, torch.optim.RMSprop)
    rates = []
    for epoch in (0, 4, 9, 20):
        trainer.train_epoch(epoch)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.001, 0.005, 0.01, 0.01])
    logits, labels = torch.randn(9, 3), torch.arange(9) % 3
    eps = 1 - math.log(2)
    rows = [math.log(eps + float(F.cross_entropy(logits[i], labels[i]))) - math.log(eps) for i in range(9)]
    assert float(losses.saturating_label_loss(logits, labels)) == pytest.approx(sum(rows) / 9)


@pytest.mark.parametrize("kind", ["log", "cross_entropy"])
@pytest.mark.parametrize("labels", [False, True])
def test_loss_is_of_the_nodes_that_are_asked(small_graph, quick, kind, labels):
    config = quick.updated({"teacher": {"name": "drgat"}, **(WITH_LABELS if labels else {})})
    config = config.updated({"attention": {"loss": kind}})
    split = split_graph(small_graph)
    trainer = build_teacher_trainer(build_configured_teacher(config, split, 3), split, config)
    asked = torch.tensor([2, 5, 11]) if labels else torch.arange(15)
    logits, y = torch.randn(60, 3), small_graph.y
    trainer.forward = lambda *_: (logits, asked) if labels else logits
    loss = losses.saturating_label_loss if kind == "log" else F.cross_entropy
    torch.testing.assert_close(trainer.epoch_loss(0), loss(logits[asked], y[asked]))


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("name", ATTENTION_TEACHERS)
def test_distils(small_graph, quick, name, labels, setting):
    """With input noise for the reliability of neighbours, and with its hidden layer for the similarity loss."""
    config = quick.updated({"setting": setting, "distill": {"similarity_weight": 0.1}})
    result = rbm.distill(
        small_graph, name, config=config.updated(WITH_LABELS) if labels else config, unseen_fraction=0.4
    )
    assert result.summary["teacher"]["name"] == name
    assert result.summary["teacher"]["test_accuracy"] > 0.7, "a third is chance"
    assert result.summary["rbm"]["test_accuracy"] > 0.5, "of 12 unseen nodes in the inductive setting"
    assert isinstance(result.teacher, LabelInput) == labels
    with fast_float32("cpu"):  # as in training
        assert torch.equal(result.teacher(small_graph.x, small_graph.edge_index), result.teacher_logits)
    assert result.timings["teacher"]["one_node_ms"] > 0


def test_logits_teach_what_the_module_teaches(small_graph, quick):
    config = quick.updated({"distill": {"neighbors": False}, **WITH_LABELS})
    by_module = rbm.distill(small_graph, "revgat", config=config)
    small_graph.teacher_logits = by_module.teacher_logits
    by_logits = rbm.distill(small_graph, "logits", config=config)
    for method, student in by_module.students.items():
        for one, other in zip(
            student.state_dict().values(), by_logits.students[method].state_dict().values(), strict=True
        ):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ATTENTION_TEACHERS)
def test_resumes_to_the_same_bits(small_graph, quick, tmp_path, name):
    config = quick.updated(WITH_LABELS)
    options = {"teacher": name, "config": config, "methods": ["mlp"]}
    rbm.distill(small_graph, folder=tmp_path / "whole", **options)
    killed_and_resumed(small_graph, tmp_path / "killed", "teacher", 17, **options)
    for file in ("teacher.safetensors", "mlp.safetensors", "summary.json"):
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_cache_knows_the_section_for_these_teachers_alone(small_graph, quick, tmp_path):
    split, changed = split_graph(small_graph), {"attention": {"loss": "cross_entropy"}}

    def names(name: str) -> list[set[str]]:
        files = []
        for index, change in enumerate(({}, changed)):
            config = quick.updated({"teacher": {"name": name}}).updated(change)
            teacher = build_configured_teacher(config, split, 3)
            cache = Cache(tmp_path / f"{name}{index}")
            cached_teacher(teacher, split, config, 3, cache, dict, Progress(None))
            files.append({path.name for path in cache.folder.iterdir()})
        return files

    assert names("sage")[0] == names("sage")[1]
    assert names("revgat")[0] != names("revgat")[1]
    rbm.distill(small_graph, "revgat", config=quick, methods=["glnn"], cache=tmp_path / "kept")
    again = rbm.distill(small_graph, "revgat", config=quick, methods=["glnn"], cache=tmp_path / "kept")
    assert len(list((tmp_path / "kept").glob("teacher-*"))) == 1
    assert not again.teacher.training


@pytest.mark.parametrize(("name", "reads"), [("sage", False), ("gcn", False), ("revgat", True), ("drgat", True)])
def test_fingerprints_know_the_section_for_these_teachers_alone(name, reads):
    config = Config().updated({"teacher": {"name": name}})
    changed = config.updated({"attention": {"heads": 1}})
    for method in ("teacher", "rbm", "glnn"):
        assert (config_fingerprint(config, method) != config_fingerprint(changed, method)) == reads
    assert config_fingerprint(config, "cohop") == config_fingerprint(changed, "cohop"), "it has no teacher"


def test_presets():
    small, arxiv = (preset_config("clean", name, teacher="drgat") for name in ("cora", "ogbn-arxiv"))
    assert not small.attention.label_input
    assert (small.teacher.num_layers, small.attention.heads, small.attention.label_mask_rate) == (3, 3, 0.5)
    assert arxiv.attention.label_input
    assert (arxiv.teacher.lr, arxiv.teacher.max_epochs, arxiv.attention.edge_dropout) == (0.002, 2000, 0.5)
    assert preset_config("clean", "ogbn-arxiv").attention == Config().attention


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 0}, "attention.heads is 0, expected between 1 and 1000"),
        ({"groups": 1}, "attention.groups is 1, expected between 2 and 1000"),
        ({"label_mask_rate": 1.0}, "attention.label_mask_rate is 1.0, expected at least 0 and below 1"),
        ({"label_iterations": -1}, "attention.label_iterations is -1"),
        ({"loss": "l2"}, "attention.loss is 'l2', expected one of log, cross_entropy"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        Config().updated({"attention": changes})


def test_groups_that_do_not_fit_are_refused_by_name(small_graph, quick):
    with pytest.raises(ValueError, match="groups: got 3"):
        rbm.distill(small_graph, "revgat", config=quick.updated({"attention": {"groups": 3}}))


def spoiled(data: Data, how: str) -> Data:
    """The graph with a defect."""
    data, some = data.clone(), torch.arange(0, 60, 2)
    if how == "no edges":
        data.edge_index = torch.empty(2, 0, dtype=torch.int64)
    elif how == "isolated":
        data.edge_index = data.edge_index[:, (data.edge_index > 20).all(0)]
    elif how == "loops and repeats":
        data.edge_index = torch.cat([data.edge_index, data.edge_index, torch.stack([some, some])], dim=1)
    elif how == "one training node":
        data.train_mask[1:] = False
    elif how == "sparse features":
        data.x = (data.x * (data.x > 0.5)).to_sparse_csr()
    return data


@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("how", ["no edges", "isolated", "loops and repeats", "one training node", "sparse features"])
@pytest.mark.parametrize("name", ATTENTION_TEACHERS)
def test_bad_graphs(small_graph, quick, name, how, norm):
    config = quick.updated({"setting": "inductive", "teacher": {"norm": norm, "max_epochs": 3}, **WITH_LABELS})
    config = config.updated({"mlp": {"max_epochs": 2}})
    data = spoiled(small_graph, how)
    result = rbm.distill(data, name, config=config, methods=["mlp"], unseen_fraction=0.4, measure_latency=False)
    assert torch.isfinite(result.teacher_logits).all()


def test_sparse_features_train_as_dense_ones(small_graph, quick):
    config = quick.updated({"teacher": {"name": "revgat", "dropout": 0.0, "max_epochs": 3}, **WITH_LABELS})
    config = config.updated({"attention": {"input_dropout": 0.0}})
    dense = small_graph.clone()
    dense.x = small_graph.x * (small_graph.x > 0.5)
    sparse = dense.clone()
    sparse.x = dense.x.to_sparse_csr()
    logits = [trained(config, split_graph(data), 3)[0](data.x, data.edge_index) for data in (dense, sparse)]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
