"""The main job on a small graph: it learns, repeats exactly, survives a kill, and takes a user's own teacher."""

import json
import signal
import time

import pytest
import torch
from killed_runs import killed_at
from rbm_process import RbmProcess
from torch import nn
from torch_geometric.nn import GCN, SAGEConv

import rbm
from rbm.config import Config, RbMConfig
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.rbm import RbMTrainer, annealed_decay
from rbm.teachers.outputs import outputs_from_logits
from rbm.training.run_folder import load_student, read_metrics

QUICK = {
    "teacher": {"hidden_channels": 16, "max_epochs": 25, "patience": 25},
    "mlp": {"max_epochs": 25, "patience": 25},
    "rbm": {
        "hidden_channels": 8,
        "num_experts": 4,
        "top_k": 2,
        "max_epochs": 25,
        "patience": 25,
        "pretrain_epochs": 5,
    },
    "encoding": {"walk_length": 10, "walks_per_node": 2, "embedding_dim": 4},
}


@pytest.fixture
def quick() -> Config:
    return Config().updated(QUICK)


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize("teacher", ["sage", "gcn"])
def test_learns(small_graph, quick, setting, teacher):
    longer = {method: {"max_epochs": 60, "patience": 60} for method in ("mlp", "rbm")}
    config = quick.updated({"setting": setting, **longer})
    result = rbm.distill(small_graph, teacher, config=config, unseen_fraction=0.4)
    assert result.summary["rbm"]["test_accuracy"] > 0.7, "a third is chance"
    assert result.summary["mlp"]["test_accuracy"] > 0.7
    assert result.summary["teacher"]["name"] == teacher
    assert len(result.split.unseen_nodes) == (12 if setting == "inductive" else 0)
    student = result.students["rbm"]
    logits = student(result.student_inputs("rbm"))
    tested = result.split.unseen_nodes if setting == "inductive" else small_graph.test_mask
    accuracy = (logits[tested].argmax(-1) == small_graph.y[tested]).float().mean().item()
    assert accuracy == pytest.approx(result.summary["rbm"]["test_accuracy"]), "the student is the one reported"
    assert not any(memory.requires_grad for memory in student.memories())
    assert result.timings["rbm"]["one_node_ms"] > 0


def test_same_seed_same_numbers_and_files(small_graph, quick, tmp_path):
    state = torch.get_rng_state()
    results = [rbm.distill(small_graph, config=quick, folder=tmp_path / name) for name in ("a", "b")]
    assert torch.equal(torch.get_rng_state(), state), "the caller's random state is left alone"
    assert results[0].summary == results[1].summary
    for name in ("rbm.safetensors", "mlp.safetensors", "teacher.safetensors", "summary.json", "student.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    other = rbm.distill(small_graph, config=quick.updated({"seed": 1}))
    assert not torch.equal(other.student.layers[0].weight, results[0].student.layers[0].weight)


def test_saved_student_predicts_alike(small_graph, quick, tmp_path):
    result = rbm.distill(small_graph, config=quick, folder=tmp_path / "run")
    loaded = load_student(tmp_path / "run")
    assert torch.equal(loaded(result.student_inputs()), result.student(result.student_inputs()))
    assert {path.name for path in (tmp_path / "run").glob("[!.]*")} == {
        "config.yaml",
        "encodings.safetensors",
        "graph.safetensors",
        "inputs.json",
        "labels.safetensors",
        "metrics.jsonl",
        "mlp.safetensors",
        "results.md",
        "run.json",
        "student.json",
        "rbm.safetensors",
        "summary.json",
        "teacher.safetensors",
        "timings.json",
    }
    timings = json.loads((tmp_path / "run" / "timings.json").read_text())
    assert timings == result.timings
    whole = timings.pop("total")["seconds"]
    assert timings.keys() == {"teacher", "encodings", "mlp", "rbm", "labels", "latency", "saving"}
    assert sum(figures["seconds"] for figures in timings.values()) <= whole + 0.01
    assert all(0 < timings[name]["evaluation_seconds"] < timings[name]["seconds"] for name in ("teacher", "mlp", "rbm"))


def test_few_epochs_are_not_led_by_many_of_pretraining(small_graph, quick, tmp_path):
    """With five epochs per student, there are at most ten, whatever ``pretrain_epochs`` is."""
    few = {"max_epochs": 5, "pretrain_epochs": 50}
    config = quick.updated({"teacher": {"max_epochs": 2}, "mlp": {"max_epochs": 2}, "rbm": few, "moe": few})
    rbm.distill(small_graph, config=config, methods=("mlp", "rbm", "moe"), folder=tmp_path / "run")
    records = read_metrics(tmp_path / "run")
    for phase in ("rbm", "moe"):
        assert sum(record["phase"] == phase for record in records) == 10


KILLS = [("teacher", 7), ("mlp", 12), ("rbm", 3), ("rbm", 5), ("rbm", 19)]


@pytest.mark.parametrize(("phase", "epoch"), KILLS)
def test_resumes_to_the_same_numbers(small_graph, quick, tmp_path, phase, epoch):
    """Killed in any phase: before, at and after the end of pretraining."""
    whole = rbm.distill(small_graph, config=quick, folder=tmp_path / "whole")
    with killed_at(phase, epoch):
        rbm.distill(small_graph, config=quick, folder=tmp_path / "killed")
    assert not (tmp_path / "killed" / "summary.json").exists()

    resumed = rbm.distill(small_graph, config=quick, folder=tmp_path / "killed", resume=True)
    assert resumed.summary == whole.summary
    for name in ("rbm.safetensors", "summary.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    without_seconds = [
        [{key: value for key, value in record.items() if key != "seconds"} for record in read_metrics(tmp_path / run)]
        for run in ("killed", "whole")
    ]
    assert without_seconds[0] == without_seconds[1]


@pytest.mark.slow
def test_survives_kill_9(tmp_path):
    """The command line, killed without warning in the middle of the student's training."""
    command = ["distill", "--no-plots", "--set", "teacher.max_epochs=10"]
    command += ["--set", "mlp.max_epochs=10", "--set", "rbm.max_epochs=30", "--set", "rbm.hidden_channels=32"]
    whole = RbmProcess(*command, "--out", "whole", cwd=tmp_path)
    said = whole.finish()
    assert whole.returncode == 0, said

    killed = RbmProcess(*command, "--out", "killed", cwd=tmp_path)
    metrics, deadline = tmp_path / "killed" / "metrics.jsonl", time.monotonic() + 240
    while time.monotonic() < deadline and killed.returncode is None:
        if metrics.exists() and '"phase": "rbm"' in metrics.read_text():
            break
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.finish()
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "summary.json").exists()

    resumed = RbmProcess(*command, "--out", "killed", "--resume", cwd=tmp_path)
    said = resumed.finish()
    assert resumed.returncode == 0, said
    for name in ("summary.json", "rbm.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


class OwnTeacher(nn.Module):
    """A user's module that does not use this package."""

    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(12, 3)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


@pytest.mark.datasets
def test_cora_in_a_few_epochs(data_root):
    fast = {"lr": 0.05, "weight_decay": 0.0, "max_epochs": 30}
    student = {**fast, "hidden_channels": 32, "num_experts": 4, "top_k": 2, "pretrain_epochs": 5}
    changes = {"teacher": {**fast, "hidden_channels": 32}, "mlp": fast, "rbm": student}
    data = rbm.load_dataset("cora", data_root)
    summary = rbm.distill(data, config=Config().updated(changes)).summary
    assert summary["teacher"]["test_accuracy"] > 0.75
    assert summary["rbm"]["test_accuracy"] > 0.7, "the largest class has 30 %"


def test_anyones_module_and_anyones_logits(small_graph, quick):
    torch.manual_seed(0)
    teacher = OwnTeacher()
    by_module = rbm.distill(small_graph, teacher, config=quick)
    assert teacher.training, "its mode is its owner's affair"
    assert by_module.summary["teacher"]["name"] == "given"
    assert by_module.summary["teacher"]["parameters"] == sum(p.numel() for p in teacher.parameters())
    logits = teacher(small_graph.x, small_graph.edge_index)
    by_logits = rbm.distill(small_graph, logits, config=quick)
    assert by_logits.teacher is None
    assert by_logits.summary["rbm"] == by_module.summary["rbm"]
    assert "one_node_ms" not in by_logits.timings["teacher"]


def test_soft_labels_reach_the_student(small_graph, quick):
    """With a deliberately wrong teacher and no hard labels, students follow the teacher instead of the labels."""
    lies = 8.0 * nn.functional.one_hot((small_graph.y + 1) % 3, 3).float()
    alone = {"distill": {"label_weight": 0.0, "neighbors": False}, "encoding": {"deepwalk": False}}
    alone["rbm"] = {"min_epochs": 24}  # otherwise the epoch closest to the true labels is selected
    result = rbm.distill(small_graph, lies, config=quick.updated(alone), methods=["rbm"])
    predicted = result.student(result.student_inputs()).argmax(-1)
    assert (predicted == (small_graph.y + 1) % 3).float().mean() > 0.9


def test_unseen_nodes_never_influence_training(small_graph, quick):
    """Inductive: changing features, edges and labels of unseen nodes does not change the trained models."""
    config = quick.updated({"setting": "inductive"})
    result = rbm.distill(small_graph, config=config, unseen_fraction=0.4)
    changed, unseen = small_graph.clone(), result.split.unseen_nodes
    changed.x[unseen] = torch.randn(len(unseen), 12)
    changed.y[unseen] = 2 - changed.y[unseen]
    extra = torch.stack([unseen, torch.zeros_like(unseen)])
    changed.edge_index = torch.cat([changed.edge_index, extra, extra.flip(0)], dim=1)
    again = rbm.distill(changed, config=config, unseen_fraction=0.4)
    for a, b in zip(result.student.state_dict().values(), again.student.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert again.summary["rbm"]["val_accuracy"] == result.summary["rbm"]["val_accuracy"]


def test_annealed_decay():
    config = RbMConfig(decay=0.9, anneal_delta=0.05, anneal_steps=200)
    assert annealed_decay(config, 0) == 0.9
    assert annealed_decay(config, 200) == pytest.approx(0.905)
    assert annealed_decay(RbMConfig(decay=0.9, anneal_delta=50.0), 200) == 1.0
    assert annealed_decay(RbMConfig(decay=0.9), 10_000) == 0.9


def test_routing_begins_with_clones_centres_and_a_fresh_optimizer(small_graph, quick):
    student = rbm.RbMStudent(12, 8, 3, num_experts=4, top_k=2)
    split = split_graph(small_graph)
    trainer = RbMTrainer(student, split, outputs_from_logits(torch.randn(60, 3), split), quick)
    for epoch in range(5):
        student.train()
        trainer.train_epoch(epoch)
        assert student.pretraining
    before = [layer.weight[0].clone() for layer in student.layers]
    trainer._begin_routing()
    assert not student.pretraining
    assert not trainer.optimizer.state, "the optimiser starts anew"
    for layer, weight in zip(student.layers, before, strict=True):
        assert all(torch.equal(layer.weight[e], weight) for e in range(4))
        torch.testing.assert_close(layer.memory.norm(dim=-1), torch.ones(4))


@pytest.mark.parametrize(("memory_weight_decay", "expected"), [(False, 0.0), (True, 5e-4)])
def test_memory_has_its_own_optimizer_group(small_graph, quick, memory_weight_decay, expected):
    config = quick.updated({"rbm": {"memory_weight_decay": memory_weight_decay}})
    student = rbm.RbMStudent(12, 8, 3, num_experts=4, top_k=2)
    split = split_graph(small_graph)
    teacher_outputs = outputs_from_logits(torch.randn(60, 3), split)
    groups = RbMTrainer(student, split, teacher_outputs, config).optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [5e-4, expected]
    assert {id(p) for p in groups[1]["params"]} == {id(memory) for memory in student.memories()}
    without = config.updated({"rbm": {"self_similarity_weight": 0.0}})
    trainer = RbMTrainer(student, split, teacher_outputs, without)
    assert len(trainer.optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(60, 4), r"teacher logits have shape \[60, 4\], expected \[60, 3\]"),
        (torch.zeros(59, 3), r"teacher logits have shape \[59, 3\]"),
        (torch.zeros(60, 3).index_fill(0, torch.tensor(7), float("nan")), "teacher logits of node 7 are not finite"),
        (torch.linspace(-3, 3, 180).view(60, 3).softmax(-1), "teacher logits are probabilities"),
        (torch.linspace(-3, 3, 180).view(60, 3).softmax(-1).half(), "teacher logits are probabilities"),
        (torch.eye(3)[torch.arange(60) % 3], r"such as probabilities\.clamp_min\(1e-9\)\.log\(\)"),
    ],
)
def test_bad_teacher_logits(small_graph, quick, logits, message):
    with pytest.raises(ValueError, match=message):
        rbm.distill(small_graph, logits, config=quick)


class Answering(nn.Module):
    """A teacher that returns what ``answer`` makes of the features."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x, edge_index):
        return self.answer(x)


@pytest.mark.parametrize(
    ("teacher", "error", "message"),
    [
        (Answering(lambda x: x[:, :5]), ValueError, r"a tensor \[60, 5\], expected a tensor of logits \[60, 3\]"),
        (Answering(lambda x: (x[:, :3], x)), TypeError, "a Answering, which returned a tuple.*; return them alone"),
        (Answering(lambda x: x[:, :3].softmax(-1)), ValueError, r"are probabilities.* before its softmax"),
        (Answering(lambda x: x[:, :3] / 0), ValueError, "logits of node 0 are not finite"),
        (GCN(12, 8, num_layers=2, out_channels=3).double(), TypeError, r"of torch.float64.*use teacher\.float\(\)"),
        (GCN(11, 8, num_layers=2, out_channels=3), RuntimeError, "cannot be multiplied"),
    ],
)
def test_an_unfit_teacher_leaves_the_run_in_its_folder(small_graph, quick, tmp_path, teacher, error, message):
    folder = tmp_path / "run"
    rbm.distill(small_graph, torch.randn(60, 3), config=quick, methods=["mlp"], folder=folder, plots=False)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(error, match=message):
        rbm.distill(small_graph, teacher, config=quick, folder=folder, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(error, match=message):
        rbm.distill(small_graph, teacher, config=quick, folder=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        ("nosmog", {}, "nosmog.similarity_weight is set"),
        ("moe", {"distill": {"similarity_weight": 0.1}}, "distill.similarity_weight is set"),
        ("rbm", {"rbm": {"memory_init": "teacher"}}, "rbm.memory_init is teacher"),
    ],
)
def test_a_missing_hidden_layer_is_reported_before_training(small_graph, quick, tmp_path, method, changes, reason):
    """``glnn`` would be trained first."""
    config, methods = quick.updated(changes), ["glnn", method]
    with pytest.raises(ValueError, match=f"{reason}, but this teacher shows no hidden layer"):
        rbm.distill(small_graph, torch.randn(60, 3), config=config, methods=methods, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_module_with_embed_shows_a_hidden_layer(small_graph, quick):
    teacher = rbm.distill(small_graph, config=quick, methods=["mlp"]).teacher
    config = quick.updated({"distill": {"similarity_weight": 0.1}})
    assert rbm.distill(small_graph, teacher, config=config, methods=["mlp"]).teacher is teacher


@pytest.mark.parametrize("where", [{"folder": "run"}, {}, {"console": None}])
def test_a_run_warns_of_flat_soft_labels_and_of_its_graph_once(
    small_graph, quick, caplog, tmp_path, monkeypatch, where
):
    """Also if standard error is no terminal, as here; not if a caller wants silence, as a search does."""
    monkeypatch.chdir(tmp_path)
    logits = 0.01 * torch.eye(3)[small_graph.y] - 1
    small_graph.edge_weight = torch.ones(small_graph.num_edges)
    rbm.distill(small_graph, logits, config=quick, methods=["glnn"], **where)
    for words in ("teacher.min_epochs: 100", "data: edge_weight is not used"):
        assert caplog.text.count(words) == int("console" not in where)


def test_more_experts_than_nodes(small_graph, quick):
    with pytest.raises(ValueError, match=r"rbm.num_experts is 61 but the observed graph has 60 nodes"):
        rbm.distill(small_graph, config=quick.updated({"rbm": {"num_experts": 61}}))
    config = quick.updated({"setting": "inductive", "rbm": {"num_experts": 49}})
    with pytest.raises(ValueError, match=r"rbm.num_experts is 49 but the observed graph has 48 nodes"):
        rbm.distill(small_graph, config=config, unseen_fraction=0.4)
    config = config.updated({"rbm": {"num_experts": 48}})
    assert rbm.distill(small_graph, config=config, unseen_fraction=0.4, methods=["rbm"]).method == "rbm"


def test_bad_data_writes_nothing(small_graph, quick, tmp_path):
    small_graph.x[5, 0] = float("nan")
    with pytest.raises(ValueError, match="5"):
        rbm.distill(small_graph, config=quick, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_summary_is_json(small_graph, quick, tmp_path):
    result = rbm.distill(small_graph, config=quick, folder=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == result.summary


@pytest.mark.parametrize("asked", ["resume", "overwrite", "plots"])
def test_what_needs_a_run_folder_is_refused_without_one(small_graph, asked):
    """Regression test: resume trained everything anew, and plots wrote none, without a message."""
    with pytest.raises(ValueError, match=f"{asked} is True but folder is None; give the run a folder"):
        rbm.distill(small_graph, **{asked: True})
