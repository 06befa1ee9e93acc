"""The candidates of ``experiments/expert_candidates.py``: each changes only what it is meant to change. Also the effect
of ``experiments/experts_used.py`` on a trained student.
"""

from dataclasses import replace

import pytest
import torch
from scripts import load_script
from trained_rbm import trained

import rbm
from rbm.config import Config
from rbm.datasets.splits import split_graph
from rbm.distillation.registry import METHODS
from rbm.nn.saved_student import STUDENTS
from rbm.teachers.outputs import outputs_from_logits

SHAPE = {"hidden_channels": 8, "num_experts": 4, "top_k": 2, "pretrain_epochs": 3, "max_epochs": 4}


@pytest.fixture(scope="module")
def plugin():
    """The file's module; its registrations are undone so that they do not affect other tests."""
    before = dict(METHODS), dict(STUDENTS)
    yield load_script("experiments/expert_candidates.py")
    for registry, entries in zip((METHODS, STUDENTS), before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.fixture
def quick(plugin) -> Config:
    return Config().updated(
        {"teacher": {"max_epochs": 3}, "rbm": SHAPE | plugin.START, "encoding": {"deepwalk": False}}
    )


def test_low_rank_experts_differ_by_their_rank(plugin, small_graph, quick):
    trainer = trained(small_graph, quick.updated({"rbm": {"hidden_channels": 16}}), 3, plugin.LowRankTrainer)
    trainer.model.train()
    trainer.begin_epoch(3)
    first, shared = trainer.model.layers[0], trainer.shared_expert.shared[0]
    assert torch.equal(first.weight, shared["weight"].expand_as(first.weight)), "corrections start at zero"
    for epoch in (4, 5):
        trainer.train_epoch(epoch)
    corrections = (first.weight - shared["weight"]).detach().double()
    assert [int(torch.linalg.matrix_rank(each, rtol=1e-3)) for each in corrections] == [plugin.RANK] * 4
    assert torch.equal(first.attention, first.attention[:1].expand_as(first.attention))


def test_low_rank_experts_get_the_gradients_of_the_chain_rule(plugin):
    layer = rbm.FusedRbMLayer(5, 6, num_experts=3, top_k=2)
    layer.clone_expert(0)
    parts = plugin.LowRankExperts([layer], 2)
    for own in parts.own:
        torch.nn.init.normal_(own["up"])
    parts.write_experts()
    gradients = [torch.randn_like(each) for each in (layer.weight, layer.bias, layer.attention)]
    shared, own = parts.shared[0], parts.own[0]
    whole = shared["weight"] + own["up"] @ own["down"], shared["bias"] + own["bias"], shared["attention"].expand(3, 5)
    torch.testing.assert_close(layer.weight, whole[0])
    expected = torch.autograd.grad(
        sum((each * gradient).sum() for each, gradient in zip(whole, gradients, strict=True)), parts.parameters()
    )
    for each, gradient in zip((layer.weight, layer.bias, layer.attention), gradients, strict=True):
        each.grad = gradient
    parts.take_gradients()
    for parameter, gradient in zip(parts.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("routed_by", ["encodings", "features"])
def test_router_and_experts_see_columns_of_their_own(plugin, routed_by, sparse):
    torch.manual_seed(0)
    student = plugin.ApartStudent(9, 8, 3, encoded=4, routed_by=routed_by, num_experts=4, top_k=2).eval()
    features, encodings = torch.randn(30, 5), torch.randn(30, 4)

    def rows(features, encodings):
        return (features.to_sparse_csr(), encodings) if sparse else torch.cat([features, encodings], dim=1)

    def first(x):
        return student.layers[0](x, return_routing=True)

    y, routing = first(rows(features, encodings))
    routed, seen = (encodings, features) if routed_by == "encodings" else (features, encodings)
    other = torch.randn_like(seen)
    moved, same_routing = first(rows(*((other, routed) if routed_by == "encodings" else (routed, other))))
    torch.testing.assert_close(same_routing.cosines, routing.cosines)
    assert not torch.allclose(moved, y)
    memory = student.layers[0].memory.detach().clone()
    width = slice(5, 9) if routed_by == "encodings" else slice(0, 5)
    cosines = torch.nn.functional.cosine_similarity(routed[:, None], memory[None, :, width], dim=-1)
    cosines = cosines * memory[:, width].norm(dim=-1) / memory.norm(dim=-1)
    torch.testing.assert_close(routing.cosines, cosines.topk(2).values)


def test_a_student_takes_the_settings_that_its_base_knows(plugin, quick):
    settings = quick.updated({"rbm": {"num_layers": 3, "norm": "layer", "top_k": 1}}).rbm
    student = plugin.ApartStudent.from_config(settings, in_channels=9, out_channels=3, encoded=4, routed_by="features")
    assert [type(norm) for norm in student.norms] == [torch.nn.LayerNorm] * 2
    assert [(layer.out_features, layer.top_k) for layer in student.layers] == [(8, 1), (8, 1), (3, 1)]
    assert student.layers[0].init_scale == 1.0


def test_the_memory_of_a_router_is_placed_by_its_own_columns(plugin):
    student = plugin.ApartStudent(9, 8, 3, encoded=4, routed_by="encodings", num_experts=2, top_k=1).eval()
    x = torch.randn(20, 9)
    (_, rows), (_, hidden) = student.router_inputs(x)
    assert not rows[:, :5].any()
    assert torch.equal(rows[:, 5:], x[:, 5:])
    assert hidden.shape == (20, 8)


def test_agreement_is_asked_of_nodes_that_do_not_teach(plugin, small_graph, quick):
    trainer = trained(small_graph, quick, 2, plugin.AgreementTrainer)
    asked = small_graph.val_mask
    assert not trainer.targets.mass[asked].any()
    assert trainer.targets.mass[~asked].sum(-1).gt(0).all()
    with torch.no_grad():
        answers = trainer.model(small_graph.x).argmax(-1)
    says = (answers == trainer.teacher_outputs.soft_labels.argmax(-1))[asked]
    assert trainer.evaluate().val == pytest.approx(float(says.float().mean()))
    assert trainer.accuracies().val == pytest.approx(float((answers == small_graph.y)[asked].float().mean()))


def unsure_where_wrong(graph):
    """Logits of a teacher that is confident and right on every second node, and unsure and wrong on the others."""
    wrong = torch.arange(graph.num_nodes) % 2 == 1
    said = torch.where(wrong, (graph.y + 1) % 3, graph.y)
    return torch.nn.functional.one_hot(said, 3) * torch.where(wrong, 1.0, 6.0)[:, None], wrong


def test_what_is_more_likely_wrong_than_right_teaches_nobody(plugin, small_graph, quick):
    logits, wrong = unsure_where_wrong(small_graph)
    outputs = outputs_from_logits(logits, split_graph(small_graph))
    quick = quick.updated({"distill": {"neighbors": True}})
    cut = trained(small_graph, quick, 1, plugin.CutTrainer, outputs)
    chance = plugin.chance_of_being_right(logits, small_graph)
    assert torch.equal(chance < 0.5, wrong)
    assert cut.pairs.neighbors[wrong[cut.graph.sources]].sum() == 0
    assert cut.pairs.neighbors[~wrong[cut.graph.sources]].gt(0).all()
    alone = replace(cut.config.distill, neighbors=False)
    without = trained(small_graph, replace(quick, distill=alone), 1, plugin.CutTrainer, outputs)
    assert torch.equal(without.targets.mass.sum(-1) == 0, wrong)
    torch.testing.assert_close(without.targets.mass[~wrong], logits[~wrong].softmax(-1) / 60)


def test_smoothing_is_by_the_chance_of_being_wrong(plugin, small_graph):
    logits, wrong = unsure_where_wrong(small_graph)
    soft = plugin.smoothed(logits, small_graph).softmax(-1)
    torch.testing.assert_close(soft[wrong], torch.full_like(soft[wrong], 1 / 3))
    torch.testing.assert_close(soft[~wrong], logits[~wrong].softmax(-1))


@pytest.mark.parametrize("name", ["start_1", "low_rank", "agreement", "smoothed", "cut", "route_by_encodings"])
def test_each_trains_in_the_main_job(plugin, small_graph, quick, name):
    few = quick.updated({"encoding": {"walk_length": 4, "walks_per_node": 1, "embedding_dim": 8}})
    result = rbm.distill(small_graph, config=few, methods=[name], labels_alone=False, measure_latency=False)
    answers = result.students[name](result.student_inputs(name)).argmax(-1)
    found = (answers == small_graph.y)[small_graph.val_mask].float().mean()
    assert result.summary[name]["val_accuracy"] == pytest.approx(float(found))


def test_what_is_done_to_a_trained_student():
    used = load_script("experiments/experts_used.py")
    torch.manual_seed(0)
    student, x = rbm.RbMStudent(6, 8, 3, num_experts=4, top_k=2).eval(), torch.randn(20, 6)
    with torch.no_grad():
        for layer in student.layers:
            torch.nn.init.normal_(layer.attention)
        before, changed = student(x), used.with_mean_experts(student)(x)
        assert not torch.allclose(before, changed)
        for layer in student.layers:
            layer.clone_expert(0)
            layer.attention.copy_(layer.attention[:1].expand_as(layer.attention))
        torch.testing.assert_close(used.with_mean_experts(student)(x), student(x))
        _, routed = student.layers[0](x, return_routing=True)
        _, moved = used.with_other_experts(student).layers[0](x, return_routing=True)
    assert torch.equal(moved.experts, (routed.experts + 1) % 4)


def test_fading_gates_are_continuous_where_a_row_changes_its_experts(plugin):
    torch.manual_seed(0)
    plain, fading = (kind(6, 4, num_experts=4, top_k=2) for kind in (rbm.FusedRbMLayer, plugin.FadingLayer))
    fading.load_state_dict(plain.state_dict())
    x, memory = torch.randn(6), plain.memory
    # Between these two rows, the second and the third expert of the row change places.
    at = torch.nn.functional.cosine_similarity(x, memory, dim=-1).argsort(descending=True)
    apart = torch.nn.functional.normalize(memory[at[1]] - memory[at[2]], dim=0)
    tied = x - apart * (x @ apart)
    rows = torch.stack([tied + 1e-4 * apart, tied - 1e-4 * apart])
    chosen = plain.route(rows).experts.sort(dim=-1).values
    assert not torch.equal(*chosen), "the rows have different experts"
    jump = {layer: torch.diff(layer(rows), dim=0).norm().item() for layer in (plain, fading)}
    assert jump[fading] < 0.01 * jump[plain]
    gates = fading.route(torch.randn(20, 6)).gates
    torch.testing.assert_close(gates.sum(-1), torch.ones(20))
    assert (gates >= 0).all()


def test_with_all_experts_gates_do_not_fade(plugin):
    layer = plugin.FadingLayer(6, 4, num_experts=3, top_k=3)
    rows = torch.randn(5, 6)
    torch.testing.assert_close(layer.route(rows).gates, layer.route(rows).cosines.softmax(-1))


def test_clipped_gradients_and_amsgrad(plugin, small_graph, quick):
    clipped = trained(small_graph, quick, 4, plugin.ClippedTrainer)
    clipped.train_epoch(4)
    for parameter in clipped.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    clipped.optimizer_step()
    norms = torch.stack([parameter.grad.norm() for parameter in clipped.model.parameters()])
    torch.testing.assert_close(norms.norm(), torch.tensor(plugin.MAX_NORM))
    largest = trained(small_graph, quick, 4, plugin.MaximumTrainer)
    largest.train_epoch(4)
    assert all("max_exp_avg_sq" in state for state in largest.optimizer.state.values())
