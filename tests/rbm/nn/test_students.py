"""Students share one interface; the RbM student can pretrain, be cloned and be counted."""

import pytest
import torch
from torch.nn import functional as F

from rbm import FusedRbMLayer, MLPStudent, RbMStudent
from rbm.nn import students
from rbm.nn.moe import MoEStudent
from rbm.nn.parameters import count_parameters
from rbm.nn.reference import ReferenceRbMLayer
from rbm.nn.simmlp import SimMLPStudent
from rbm.nn.students import NORMS, CoHOpStudent, MixtureStudent, build_norm, predict
from rbm.nn.tined import TINEDStudent


def make(**options):
    return RbMStudent(6, 8, 3, **{"num_layers": 3, "num_experts": 4, "top_k": 2, **options})


@pytest.mark.parametrize("norm", NORMS)
def test_interface(norm):
    x = torch.randn(10, 6)
    for student, routed in (
        (make(norm=norm), 3),
        (MoEStudent(6, 8, 3, num_layers=3, num_experts=4, top_k=2, norm=norm), 3),
        (MLPStudent(6, 8, 3, num_layers=3, norm=norm), 0),
    ):
        assert {type(other) for other in student.norms} == {type(build_norm(norm, 8))}
        logits, (routings, *_) = student(x, return_trace=True)
        assert logits.shape == (10, 3)
        assert len(routings) == routed
        assert student.eval()(x).shape == (10, 3)


def test_equals_a_stack_of_reference_layers():
    student = make(norm="layer").double().eval()
    x = torch.randn(20, 6, dtype=torch.float64)
    h = x
    for i, layer in enumerate(student.layers):
        if i:
            h = F.relu(student.norms[i - 1](h))
        reference = ReferenceRbMLayer(layer.in_features, layer.out_features, 4, 2, dtype=torch.float64).eval()
        reference.load_state_dict(layer.state_dict())
        h = reference(h)
    torch.testing.assert_close(student(x), h)


def test_mlp_order_of_operations():
    student = MLPStudent(6, 8, 3, num_layers=2, norm="layer", dropout=0.5).eval()
    x = torch.randn(5, 6)
    first, last = student.layers
    torch.testing.assert_close(student(x), last(F.relu(student.norms[0](first(x)))))
    assert not torch.equal(student.train()(x), student(x))


def test_pretraining_is_the_first_experts_alone():
    student = make(norm="batch")
    student.pretraining = True
    memories = [memory.clone() for memory in student.memories()]
    x = torch.randn(10, 6)
    logits, (routings, *_) = student(x, return_trace=True)
    assert routings == []
    logits.sum().backward()
    for layer in student.layers:
        assert layer.weight.grad[0].abs().sum() > 0
        assert layer.weight.grad[1:].abs().sum() == 0
        assert layer.attention.grad is None
    student.eval()
    assert all(torch.equal(a, b) for a, b in zip(memories, student.memories(), strict=True))

    student.clone_experts()
    assert not student.pretraining
    for layer in student.layers:
        assert all(torch.equal(layer.weight[e], layer.weight[0]) for e in range(4))
    assert len(student(x, return_trace=True)[1].routings) == 3


def test_dropout_first_layer():
    assert [layer.dropout for layer in make(dropout=0.4).layers] == [0.4, 0.4, 0.4]
    assert [layer.dropout for layer in make(dropout=0.4, dropout_first_layer=False).layers] == [0.0, 0.4, 0.4]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (MLPStudent, {}),
        (RbMStudent, {"num_layers": 1}),  # one dropout in each student: a second one would hide that it is missing
        (MoEStudent, {"num_layers": 1, "noise": 0.0}),
        (MoEStudent, {"num_layers": 1, "pretrain": "first"}),
        (TINEDStudent, {"num_layers": 1}),
        (SimMLPStudent, {}),
        (CoHOpStudent, {"num_layers": 2}),
    ],
)
def test_dropout_is_for_training_alone(kind, options, sparse):
    student, without = (kind(6, 16, 3, dropout=dropout, **options) for dropout in (0.5, 0.0))
    for model in (student, without):
        model.pretraining = "pretrain" in options
        for layer in model.layers:
            layer.track_memory = False
    x = torch.randn(40, 6)
    x = (x * (x > 0)).to_sparse_csr() if sparse else x
    assert not torch.allclose(student(x), student(x))
    assert torch.equal(without(x), without(x)), "nothing else is drawn"
    without.load_state_dict(student.state_dict())
    assert torch.equal(student.eval()(x), without.eval()(x))


def test_router_inputs_are_what_the_layers_see():
    student = make().eval()
    x = torch.randn(10, 6)
    seen = []
    hooks = [layer.register_forward_pre_hook(lambda _, rows: seen.append(rows[0])) for layer in student.layers]
    student(x)
    for hook in hooks:
        hook.remove()
    inputs = list(student.router_inputs(x))
    assert [layer for layer, _ in inputs] == list(student.layers)
    for (_, rows), expected in zip(inputs, seen, strict=True):
        torch.testing.assert_close(rows, expected)


@torch.no_grad()
def test_predictions_of_some_rows(monkeypatch):
    student, x = MLPStudent(6, 8, 3).eval(), torch.randn(10, 6)
    expected = student(x)
    for chunk in (students.CHUNK_ROWS, 3):
        monkeypatch.setattr(students, "CHUNK_ROWS", chunk)
        torch.testing.assert_close(predict(student, x), expected)
        torch.testing.assert_close(predict(student, x, slice(2, 9)), expected[2:9])
        assert torch.equal(predict(student, x, slice(2, 9), lambda y: y.argmax(-1)), expected[2:9].argmax(-1))
        assert predict(student, x, slice(4, 4)).shape == (0, 3)


def test_set_decay():
    student = make()
    student.set_decay(0.5)
    assert {layer.decay for layer in student.layers} == {0.5}


def test_batch_norm_with_one_row():
    norm = build_norm("batch", 4)
    norm(torch.randn(20, 4))
    mean, row = norm.running_mean.clone(), torch.randn(1, 4)
    alone = norm(row)
    assert torch.equal(norm.running_mean, mean)
    torch.testing.assert_close(alone, norm.eval()(row))


@pytest.mark.parametrize("student", [RbMStudent(6, 8, 3, norm="batch"), MLPStudent(6, 8, 3, norm="batch")])
def test_batch_norm_of_rows_in_several_dimensions(student):
    """The second dimension was taken for the channels: a wrong answer if it had as many entries, else an error."""
    student.train()(torch.randn(50, 6))
    student.eval()
    x = torch.randn(5, 8, 6)
    torch.testing.assert_close(student(x), student(x.flatten(0, 1)).unflatten(0, (5, 8)))
    torch.testing.assert_close(student(x[0, 0]), student(x[0, :1])[0])


def test_batch_norm_of_several_ranks_in_mixed_precision(monkeypatch):
    """As of one process: bfloat16 rows, of which there are more than its digits count, and float32 statistics."""
    joint, alone, rows = build_norm("batch", 4), build_norm("batch", 4), (3 * torch.randn(1001, 4) + 5).bfloat16()
    expected = alone(rows)
    # One of the ranks has all rows, so the sums over ranks are its own.
    monkeypatch.setattr(students, "world_size", lambda: 2)
    monkeypatch.setattr(students, "all_reduce_sum", lambda values: values)
    torch.testing.assert_close(joint(rows), expected)
    torch.testing.assert_close(joint(rows[:1]), alone(rows[:1]))
    torch.testing.assert_close(joint.state_dict(), alone.state_dict())


def test_unknown_norm():
    with pytest.raises(ValueError, match="norm is 'group', expected one of none, batch, layer"):
        build_norm("group", 4)


def test_counted_parameters():
    total, active = count_parameters(MLPStudent(6, 8, 3))
    assert total == active == 6 * 8 + 8 + 8 * 3 + 3
    # A layer: E (D N + N + D attention) + one scale + E D memory; k of E experts are active.
    layer = MixtureStudent([FusedRbMLayer(6, 8, 4, 2)], "none")
    assert count_parameters(layer) == (4 * (48 + 8 + 6) + 1 + 24, 2 * (48 + 8 + 6) + 1 + 24)


@pytest.mark.parametrize("student", [MLPStudent, RbMStudent])
def test_depth(student):
    assert student(6, None, 3, num_layers=1)(torch.randn(2, 6)).shape == (2, 3), "it has no hidden layer"
    with pytest.raises(ValueError, match="num_layers is 0, expected at least 1"):
        student(6, 8, 3, num_layers=0)
