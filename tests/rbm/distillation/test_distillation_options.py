"""The switches of a distillation: each has its effect, none breaks resuming, and all of them together run."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from killed_runs import killed_and_resumed
from torch import nn
from torch_geometric.data import Data

import rbm
from rbm.config import Config
from rbm.datasets.encodings import Encodings
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.rbm import RbMTrainer, annealed_decay
from rbm.distillation.trainer import StudentTrainer, student_inputs
from rbm.nn import losses
from rbm.nn.students import MLPStudent, RbMStudent
from rbm.teachers import TEACHERS
from rbm.teachers.outputs import TeacherOutputs, outputs_from_logits, outputs_from_module

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
    "reliability": {"update_start_epoch": 3},
}
OPTIONS = {
    "released": {
        "distill": {
            "temperature_mode": "scaled_log_probs",
            "mean": "pairs",
            "draw": "sample",
            "forward": "pair",
            "batch_size": 32,
            "reduction": "sum_of_batch_means",
            "shuffle": False,
        },
        "encoding": {"fill": "all_mean", "self_loops": True},
    },
    "batches": {"distill": {"batch_size": 16, "step_per_batch": True}},
    "draws": {"distill": {"draw": "sample"}},
    "adversarial": {"distill": {"adversarial_weight": 0.05, "adversarial_eps": 0.05, "adversarial_steps": 2}},
    "similarity": {"distill": {"similarity_weight": 0.1}},
    "labels": {"encoding": {"label_propagation": True, "exclude_self": True}},
    "features alone": {"encoding": {"deepwalk": False}, "distill": {"neighbors": False}},
}


@pytest.fixture
def quick() -> Config:
    return Config().updated(QUICK)


class OneClass(nn.Module):
    """A plugin's teacher, whose answer has too few columns."""

    def __init__(self, in_channels, *others):
        super().__init__()
        self.linear = nn.Linear(in_channels, 1)

    def forward(self, x, edge_index):
        return self.linear(x)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": 1}, r"^teacher\.num_layers: got 1, expected at least 2"),
        ({"name": "revgat", "hidden_channels": 7}, r"^attention\.groups: got 2, .* a divisor of hidden_channels=7"),
        ({"name": "mine"}, r"a OneClass, which returned a tensor \[60, 1\], expected .* \[60, 3\]"),
    ],
)
def test_settings_that_a_teacher_cannot_have_leave_the_run(
    small_graph, quick, tmp_path, monkeypatch, settings, message
):
    monkeypatch.setitem(TEACHERS, "mine", OneClass)
    (tmp_path / "run.json").write_text('{"format": 1, "files": ["summary.json"]}')
    (tmp_path / "summary.json").write_text("{}")
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        rbm.distill(small_graph, config=quick.updated({"teacher": settings}), folder=tmp_path, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "summary.json"}
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_choosing_settings_never_reads_a_test_label(small_graph, quick, setting):
    config = quick.updated({"evaluate_on": "validation", "setting": setting, "encoding": {"label_propagation": True}})
    result = rbm.distill(small_graph, config=config, methods=["rbm"])
    lying = small_graph.clone()
    lying.y[lying.test_mask] = (lying.y[lying.test_mask] + 1) % 3
    assert rbm.distill(lying, config=config, methods=["rbm"]).summary == result.summary
    assert len(result.split.unseen_nodes) == (7 if setting == "inductive" else 0), "half of 15 validation nodes"
    assert result.summary["rbm"]["test_accuracy"] > 0.6, "on validation nodes"
    for given in ({"teacher": torch.zeros(60, 3)}, {"encodings": [torch.zeros(60, 2)]}):
        with pytest.raises(ValueError, match="evaluate_on is 'validation'"):
            rbm.distill(small_graph, config=config, **given)


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_learns(small_graph, quick, option, setting):
    config = quick.updated(OPTIONS[option]).updated({"setting": setting})
    result = rbm.distill(small_graph, config=config, unseen_fraction=0.4, measure_latency=False)
    assert result.summary["rbm"]["test_accuracy"] > 0.6, "a third is chance"
    assert result.summary["mlp"]["test_accuracy"] > 0.6


@pytest.mark.parametrize("option", ["released", "draws", "adversarial", "similarity"])
def test_resumes_to_the_same_numbers(small_graph, quick, tmp_path, option):
    """State outside model and optimiser that training changes (exponent, projection) also survives a kill."""
    config = quick.updated(OPTIONS[option])
    whole = rbm.distill(small_graph, config=config, folder=tmp_path / "whole")
    resumed = killed_and_resumed(small_graph, tmp_path / "killed", "rbm", 14, config=config)
    assert resumed.summary == whole.summary
    for name in ("rbm.safetensors", "encodings.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_kept_teacher_is_the_teacher(small_graph, quick, tmp_path):
    first, second = (
        rbm.distill(small_graph, config=quick, cache=tmp_path / "cache", folder=tmp_path / name) for name in ("a", "b")
    )
    alone = rbm.distill(small_graph, config=quick)
    assert first.summary == second.summary == alone.summary
    assert [run.timings["teacher"].get("cached") for run in (first, second, alone)] == [None, True, None]
    assert torch.equal(second.teacher_logits, alone.teacher_logits)
    saved = [(tmp_path / name / "teacher.safetensors").read_bytes() for name in ("a", "b")]
    assert saved[0] == saved[1]
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()) == ["deepwalk", "teacher"]
    rbm.distill(small_graph, config=quick.updated({"teacher": {"lr": 0.02}}), cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("teacher-*"))) == 2


def test_methods_asked_for(small_graph, quick):
    result = rbm.distill(small_graph, config=quick, methods=["mlp"])
    assert list(result.students) == ["mlp", "labels"]
    assert result.student is result.students["mlp"]
    assert "rbm" not in result.summary
    both = rbm.distill(small_graph, config=quick)
    assert result.summary["mlp"] == both.summary["mlp"], "no student depends on what ran before it"
    with pytest.raises(ValueError, match="methods is \\['gnn'\\], expected one or more of mlp, rbm, moe,"):
        rbm.distill(small_graph, config=quick, methods=["gnn"])
    with pytest.raises(ValueError, match=r"methods is \['mlp', 'mlp'\], expected one or more of .*, each once"):
        rbm.distill(small_graph, config=quick, methods=["mlp", "mlp"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"rbm": {}}}, r"config is a dict, .*; use rbm\.Config\(\)\.updated\(config\)"),
        ({"teacher": np.ones((6, 3))}, r"teacher is a ndarray, .*; use torch\.as_tensor\(teacher\)"),
        ({"methods": "mlp,rbm"}, r"methods is 'mlp,rbm', .*; use methods=\['mlp', 'rbm'\]"),
        (
            {"teacher": torch.nn.Linear(12, 3)},
            r"a Linear with forward\(input.*cannot be called as teacher\(x, edge_index\)",
        ),
    ],
)
def test_arguments_of_another_kind(small_graph, options, message):
    with pytest.raises(TypeError, match=message):
        rbm.distill(small_graph, **options)


def test_encodings_of_ones_own(small_graph, quick):
    own = torch.nn.functional.one_hot(small_graph.y, 3).float()  # these reveal the labels
    config = quick.updated({"encoding": {"deepwalk": False}})
    result = rbm.distill(small_graph, config=config, encodings=[torch.zeros(60, 2), own])
    assert result.student_inputs().shape == (60, 12 + 2 + 3)
    assert torch.equal(result.student_inputs()[:, 14:], own)
    assert result.summary["mlp"]["test_accuracy"] == 1.0


def test_teacher_logits_of_the_graph(small_graph, quick):
    with pytest.raises(ValueError, match=r"set data\.teacher_logits"):
        rbm.distill(small_graph, "logits", config=quick)
    small_graph.teacher_logits = 9.0 * torch.nn.functional.one_hot(small_graph.y, 3).float()
    result = rbm.distill(small_graph, "logits", config=quick)
    assert result.teacher is None
    assert result.summary["teacher"]["test_accuracy"] == 1.0


def trainer_of(config: Config, graph: Data, teacher_outputs: TeacherOutputs | None = None) -> RbMTrainer:
    split = split_graph(graph)
    teacher_outputs = teacher_outputs or outputs_from_logits(torch.randn(60, 3), split)
    student = RbMStudent(12, 8, 3, num_experts=4, top_k=2)
    trainer = RbMTrainer(student, split, teacher_outputs, config)
    trainer.model.train()
    return trainer


def test_the_exponent_is_learned_from_where_student_and_teacher_agree(small_graph, quick, monkeypatch):
    logits = torch.randn(60, 3)
    teacher_outputs = TeacherOutputs(logits, logits, {})
    monkeypatch.setattr(TeacherOutputs, "entropy_change", lambda self, config, seed: torch.rand(60))
    trainer = trainer_of(quick, small_graph, teacher_outputs)
    learn, seen = trainer.reliability.learn, []
    monkeypatch.setattr(trainer.reliability, "learn", lambda agree: seen.append(agree) or learn(agree))
    before = None
    for epoch in range(6):
        trainer.model.train()
        trainer.train_epoch(epoch)
        trainer.model.eval()
        trainer.evaluate()
        assert (trainer.reliability.power != 1.0) == (epoch >= 3)
        agree = trainer.model(small_graph.x).argmax(-1) == logits.argmax(-1)
        assert [found.tolist() for found in seen] == [agree.tolist()] * (epoch >= 3)
        seen.clear()
        before = before or trainer.targets
    trainer.model.train()
    trainer.train_epoch(6)
    assert not torch.equal(before.mass, trainer.targets.mass), "targets follow the exponent"


def test_adversarial_passes_leave_the_memory_alone_unless_asked(small_graph, quick):
    def memory_after_two_epochs(**options) -> torch.Tensor:
        torch.manual_seed(0)
        config = quick.updated({"distill": {"adversarial_steps": 2, **options}, "rbm": {"pretrain_epochs": 0}})
        config = config.updated({"rbm": {"self_similarity_weight": 0.0}})
        trainer = trainer_of(config, small_graph)
        for epoch in range(2):
            trainer.train_epoch(epoch)
        trainer.model.eval()
        return trainer.model.layers[0].memory.clone()

    plain, calm = memory_after_two_epochs(), memory_after_two_epochs(adversarial_weight=1e-6)
    moved = memory_after_two_epochs(adversarial_weight=1e-6, update_memory_on_adversarial=True)
    assert torch.equal(plain, calm)
    assert not torch.allclose(plain, moved, atol=1e-4)


def test_layers_follow_the_annealed_decay(small_graph, quick):
    config = quick.updated({"rbm": {"anneal_delta": 0.5, "anneal_steps": 8}})
    trainer, decays = trainer_of(config, small_graph), []
    for epoch in (0, 4, 6):
        trainer.begin_epoch(epoch)
        decays += {layer.decay for layer in trainer.model.layers}
    assert decays == [annealed_decay(config.rbm, epoch) for epoch in (0, 4, 6)]
    assert decays == sorted(set(decays))


def test_a_rank_weights_the_commitment_by_its_share_of_the_rows(small_graph, quick):
    trainer = trainer_of(quick, small_graph)
    trainer.model.pretraining = False
    trace = trainer.model(small_graph.x, return_trace=True)[1]
    whole, half = (trainer.auxiliary_loss(trace, share) for share in (1.0, 0.5))
    commitment = sum(map(losses.commitment_loss, trace.routings))
    torch.testing.assert_close(whole - half, 0.5 * quick.rbm.commitment_weight * commitment)


def test_similarity_needs_an_embedding(small_graph, quick):
    config = quick.updated({"distill": {"similarity_weight": 0.1}})
    with pytest.raises(ValueError, match="similarity_weight is set, but this teacher shows no hidden layer"):
        trainer_of(config, small_graph)


@pytest.mark.parametrize("forward", ["node", "pair"])
def test_auxiliary_losses_of_batches_add_up_to_their_mean_over_rows(small_graph, quick, forward):
    config = quick.updated({"distill": {"forward": forward, "batch_size": 16, "neighbors": False}})

    def loss(auxiliary: float) -> float:
        torch.manual_seed(0)
        trainer = trainer_of(config, small_graph)
        trainer.auxiliary_loss = lambda trace, share: trace.last.new_tensor(auxiliary)
        return trainer.train_epoch(0)

    assert loss(3.0) - loss(0.0) == pytest.approx(3.0, rel=1e-4)


def test_similarity_compares_the_first_hidden_layer(small_graph, quick):
    split = split_graph(small_graph)
    outputs = replace(outputs_from_logits(torch.randn(60, 3), split), hidden=torch.randn(60, 5))
    config = quick.updated({"distill": {"similarity_weight": 0.1, "neighbors": False}})
    student = MLPStudent(12, 8, 3, num_layers=4)
    trainer, seen = StudentTrainer(student, split, outputs, config), []
    trainer.projection.register_forward_hook(lambda _, rows, __: seen.append(rows[0].detach()))
    expected = student.layers[0](small_graph.x)[small_graph.train_mask].detach()
    student.train()
    trainer.train_epoch(0)
    torch.testing.assert_close(seen, [expected])


def test_what_a_module_teaches(small_graph, quick):
    split = split_graph(small_graph, "inductive", unseen_fraction=0.4, seed=0)
    teacher = rbm.distill(small_graph, config=quick, methods=["mlp"]).teacher
    teacher_outputs = outputs_from_module(teacher, split, 3)
    observed = split.observed
    assert teacher_outputs.soft_labels.shape == (48, 3)
    change = teacher_outputs.entropy_change(quick.reliability, seed=0)
    assert change.shape == (48,)
    assert change is teacher_outputs.entropy_change(quick.reliability, seed=0), "computed once for all students"
    torch.testing.assert_close(teacher_outputs.embedding("distill"), teacher.embed(observed.x, observed.edge_index))
    torch.testing.assert_close(teacher_outputs.soft_labels, teacher(observed.x, observed.edge_index))
    assert change.max() == 1
    assert not torch.allclose(teacher_outputs.soft_labels, teacher_outputs.logits[split.observed_nodes]), (
        "it never met the unseen"
    )


def test_inputs_stand_in_the_order_of_their_graphs(small_graph):
    split = split_graph(small_graph, "inductive", unseen_fraction=0.4, seed=0)
    full = torch.arange(60.0)[:, None]
    observed, every = student_inputs(split, Encodings(full[split.observed_nodes], full))
    assert torch.equal(every[:, :12], small_graph.x)
    assert torch.equal(observed[:, 12].long(), split.observed_nodes)
    small_graph.x = small_graph.x.to_sparse_csr()
    packed = student_inputs(split_graph(small_graph), Encodings(full, full))[0]
    assert torch.equal(packed.to_dense(), every)


def test_an_mlp_distils_by_pairs_too(small_graph, quick):
    config = quick.updated({"distill": {"forward": "pair"}})
    split = split_graph(small_graph)
    trainer = StudentTrainer(MLPStudent(12, 8, 3), split, outputs_from_logits(torch.randn(60, 3), split), config)
    losses = [trainer.train_epoch(epoch) for epoch in range(20)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("neighbors", "draw"), [(False, "sample"), (True, "expectation"), (True, "sample")])
def test_targets_are_computed_anew_only_if_they_are_drawn(small_graph, quick, neighbors, draw):
    trainer = trainer_of(quick.updated({"distill": {"neighbors": neighbors, "draw": draw}}), small_graph)
    trainer.train_epoch(0)
    first = trainer.targets
    trainer.train_epoch(1)
    assert (trainer.targets is first) == (not neighbors or draw == "expectation")


@pytest.mark.parametrize("batch_size", [0, 59, 60, 100])
def test_one_batch_of_all_nodes_reuses_the_first_layer(small_graph, quick, batch_size):
    config = quick.updated({"distill": {"batch_size": batch_size}})
    split = split_graph(small_graph)
    trainer = StudentTrainer(MLPStudent(12, 8, 3), split, outputs_from_logits(torch.randn(60, 3), split), config)
    assert (trainer.first_layer is not None) == (batch_size != 59)
    trainer.update_targets()
    assert (trainer.first_layer is not None) == all(batch.nodes is None for batch in trainer._batches())


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_csr])
def test_a_graph_made_in_inference_mode_is_as_good_as_another(small_graph, quick, layout):
    """Features are often the output of another model, and autograd cannot save such tensors."""
    own, x = small_graph.clone(), small_graph.x
    own.x = x.to_sparse_csr() if layout == torch.sparse_csr else x
    with torch.inference_mode():
        made = own.clone()
        made.x = x.clone().to_sparse_csr() if layout == torch.sparse_csr else x.clone()
    options = {"config": quick, "methods": ["mlp", "krd", "tined"], "measure_latency": False}
    expected, found = (rbm.distill(data, **options) for data in (own, made))
    assert made.x.is_inference(), "the caller's graph is not changed"
    for method, student in expected.students.items():
        for name, tensor in student.state_dict().items():
            assert torch.equal(found.students[method].state_dict()[name], tensor)
