"""The layer at inference: one operator per call, and folded experts that are cached exactly as long as valid."""

import copy
import io
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
from layer_answers import answer, expected, make
from torch import nn
from torch.nn.utils import parametrize

from rbm import FusedRbMLayer, RbMStudent
from rbm.nn import rbm_layer as layer_module


@pytest.mark.parametrize("leading", [(), (1,), (7,), (2, 3), (2, 0, 4)])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"input_attention": False}, {"gate_temperature": 0.3}, {"dtype": torch.float64}],
    ids=["defaults", "no bias", "no attention", "temperature", "float64"],
)
def test_equals_the_forward_with_gradients(leading, options):
    layer = make(**options)
    x = torch.randn(*leading, 6, dtype=layer.weight.dtype)
    y = answer(layer, x)
    assert y.shape == (*leading, 4)
    assert not y.requires_grad
    torch.testing.assert_close(y, expected(layer, x))


def test_one_operator_a_call_and_only_at_inference(monkeypatch):
    calls = []
    operator = layer_module.routed_matmul_packed
    monkeypatch.setattr(layer_module, "routed_matmul_packed", lambda *a, **k: calls.append(a) or operator(*a, **k))
    monkeypatch.setattr(torch.Tensor, "reshape", None)  # two-dimensional rows need no reshape
    layer, x = make(), torch.randn(7, 6)
    answer(layer, x)
    assert len(calls) == 1
    with torch.inference_mode():
        layer(x)
    assert len(calls) == 2
    monkeypatch.undo()
    monkeypatch.setattr(layer_module, "routed_matmul", None)
    monkeypatch.setattr(layer_module, "routed_matmul_packed", None)
    layer(x)
    with torch.no_grad():
        layer(x, return_routing=True)
        layer.train()(x)


def test_a_student_answers_by_it_unless_asked_for_routings(monkeypatch):
    student, x = RbMStudent(6, 8, 3, num_experts=4, top_k=2).eval(), torch.randn(9, 6)
    with torch.no_grad():
        logits, (routings, *_) = student(x, return_trace=True)
        assert len(routings) == 2
        monkeypatch.setattr(layer_module, "expert_matmul", None)
        torch.testing.assert_close(student(x), logits)


def test_folds_once(folds):
    layer, x = make(), torch.randn(7, 6)
    first = answer(layer, x)
    for _ in range(3):
        assert torch.equal(answer(layer, x), first)
        with torch.inference_mode():
            assert torch.equal(layer(x), first)
    assert len(folds) == 1


def train_a_step(optimizer_class, **options):
    def change(layer):
        optimizer = optimizer_class(layer.parameters(), lr=0.1, **options)
        layer(torch.randn(9, 6, dtype=layer.weight.dtype)).square().sum().backward()
        optimizer.step()

    return change


def load(assign):
    return lambda layer: layer.load_state_dict(make().state_dict(), assign=assign)


def replace(layer):
    layer.weight = nn.Parameter(torch.randn(5, 4, 6))


def swap(layer):
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.randn(5, 4, 6)))


def write_into_data(layer):
    layer.weight.data.mul_(2)
    layer.eval()


def from_a_vector(layer):
    nn.utils.vector_to_parameters(torch.randn(sum(p.numel() for p in layer.parameters())), layer.parameters())


def in_inference_mode(layer):
    with torch.inference_mode():
        layer.bias.add_(1.0)


def without_gradients(change):
    def changed(layer):
        with torch.no_grad():
            change(layer)

    return changed


CHANGES = {
    "SGD": train_a_step(torch.optim.SGD),
    "Adam, foreach": train_a_step(torch.optim.Adam, foreach=True),
    "Adam, fused": train_a_step(torch.optim.Adam, fused=True),
    "SGD, fused": train_a_step(torch.optim.SGD, fused=True, momentum=0.9),
    "load_state_dict": load(assign=False),
    "load_state_dict, assigned": load(assign=True),
    "weight in place": without_gradients(lambda layer: layer.weight.mul_(2)),
    "bias in place": without_gradients(lambda layer: layer.bias.add_(1)),
    "attention in place": without_gradients(lambda layer: layer.attention[0].add_(1)),
    "scale in place": without_gradients(lambda layer: layer.log_scale.sub_(1)),
    "in place, in inference mode": in_inference_mode,
    "data assigned": lambda layer: setattr(layer.log_scale, "data", torch.tensor(2.0)),
    "data written into, then eval()": write_into_data,
    "parameter assigned": replace,
    "bias taken away": lambda layer: layer.register_parameter("bias", None),
    "swapped": swap,
    "from a vector": from_a_vector,
    "reset_parameters": lambda layer: layer.reset_parameters(),
    "clone_expert": lambda layer: layer.clone_expert(2),
    "memory": without_gradients(lambda layer: layer.memory.normal_()),
    "temperature": lambda layer: setattr(layer, "gate_temperature", 0.2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_notices(change):
    layer, x = make(), torch.randn(7, 6)
    before = answer(layer, x)
    for _ in range(2):
        change(layer)
        assert layer.training is False
        got = answer(layer, x)
        torch.testing.assert_close(got, expected(layer, x))
        assert not torch.allclose(got, before), "a change that changes nothing would test nothing"


def test_no_other_data_can_come_to_stand_at_the_address_of_the_folded():
    """While the copy is cached, so is the storage it was made from, so addresses distinguish them."""
    layer, x = make(), torch.randn(7, 6)
    numbers = np.ones((5, 4, 6), dtype=np.float32)
    layer.weight.data = torch.from_numpy(numbers)
    answer(layer, x)
    held = weakref.ref(numbers)
    del numbers
    layer.weight.data = torch.randn(5, 4, 6)
    assert held() is not None
    torch.testing.assert_close(answer(layer, x), expected(layer, x))
    assert held() is None


def test_a_bias_that_comes_later():
    layer, x = make(bias=False), torch.randn(7, 6)
    before = answer(layer, x)
    del layer.bias
    layer.register_parameter("bias", nn.Parameter(torch.randn(5, 4)))
    torch.testing.assert_close(answer(layer, x), expected(layer, x))
    assert not torch.allclose(answer(layer, x), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_converted(dtype):
    layer, x = make(), torch.randn(7, 6)
    answer(layer, x)
    layer.to(dtype)
    y = answer(layer, x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected(layer, x.to(dtype)))
    torch.testing.assert_close(answer(layer.float(), x), expected(layer, x))


def test_other_parameters_for_one_call():
    layer, x = make(), torch.randn(7, 6)
    other = {name: torch.randn_like(value) for name, value in layer.named_parameters()}
    mine = answer(layer, x)
    with torch.no_grad():
        got = torch.func.functional_call(layer, other, (x,))
    torch.testing.assert_close(got, torch.func.functional_call(layer, other, (x,)))
    assert torch.equal(answer(layer, x), mine)


def test_training_holds_no_second_copy_of_the_weights():
    layer, x = make(), torch.randn(7, 6)
    answer(layer, x)
    kept = weakref.ref(layer._copy.weight)
    assert kept() is not None
    layer.train()
    assert kept() is None
    layer(x)
    with torch.no_grad():
        layer(x)
    assert layer._copy is None


def test_a_copy_starts_anew():
    """Versions of a copy's parameters begin at zero and may reach those at which the original was folded."""
    layer, x = make(), torch.randn(7, 6)
    answer(layer, x)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            while copied.weight._version < layer.weight._version:
                copied.weight.mul_(1.5)
        torch.testing.assert_close(answer(copied, x), expected(copied, x))
        assert not torch.allclose(answer(copied, x), answer(layer, x))


def test_nothing_of_it_is_saved():
    layer, x = make(), torch.randn(7, 6)
    sizes = []
    for _ in range(2):
        file = io.BytesIO()
        torch.save(layer, file)
        sizes.append((len(file.getvalue()), list(layer.state_dict()), len(list(layer.buffers()))))
        answer(layer, x)
    assert layer._copy is not None
    assert sizes[0] == sizes[1]


def test_parameters_that_have_no_version(folds):
    """Tensors made in inference mode have no version to detect changes by, so nothing is cached."""
    with torch.inference_mode():
        layer, x = make(), torch.randn(7, 6)
        before = layer(x)
        layer.weight.mul_(2)
        assert not torch.allclose(layer(x), before)
        _, routing = layer(x, return_routing=True)
        assert routing.gates.shape == (7, 3)
    assert len(folds) == 2
    assert layer._copy is None


def test_kept_in_inference_mode_and_used_outside(folds):
    layer, x = make(), torch.randn(7, 6)
    with torch.inference_mode():
        first = layer(x).clone()
    assert torch.equal(answer(layer, x), first)
    assert len(folds) == 1
    torch.testing.assert_close(expected(layer, x), first)


def test_reparametrised(folds):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    layer, x = make(), torch.randn(7, 6)
    parametrize.register_parametrization(layer, "weight", Doubled())
    before = answer(layer, x)
    with torch.no_grad():
        layer.parametrizations.weight.original.mul_(2)
    torch.testing.assert_close(answer(layer, x), expected(layer, x))
    assert not torch.allclose(answer(layer, x), before)
    assert layer._copy is None


def test_not_kept_while_a_cuda_graph_is_captured(monkeypatch):
    """Captured work has not run yet, so outputs outside the graph must not use its results."""
    layer, x = make(), torch.randn(7, 6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    answer(layer, x)
    assert layer._copy is None
    monkeypatch.undo()
    answer(layer, x)
    assert layer._copy is not None


def test_autocast():
    """Each precision has its own folded experts, and the router uses the original rows."""
    layer = FusedRbMLayer(2, 4, 2, 1).eval()
    layer.memory.copy_(torch.eye(2))
    x = torch.tensor([[1.0, 1.001], [1.0, 3.0], [3.0, 1.0]])  # rounded, the first row would be on the boundary
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(layer(x), expected(layer, x))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = layer(x)
                assert y.dtype == torch.bfloat16
                assert torch.equal(y, expected(layer, x))
                assert torch.equal(layer(x.bfloat16()), expected(layer, x.bfloat16()))


def test_fullgraph_compile_keeps_nothing():
    layer, x = make(), torch.randn(7, 6)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(answer(compiled, x), expected(layer, x))
        assert layer._copy is None
        with torch.no_grad():
            layer.weight.mul_(2)
    answer(layer, x)
    with torch.no_grad():
        layer.weight.mul_(2)
    torch.testing.assert_close(answer(compiled, x), expected(layer, x))


def test_export_takes_the_parameters_and_not_what_is_kept():
    layer, x = make(), torch.randn(7, 6)
    answer(layer, x)
    with torch.no_grad():
        exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert torch.ops.rbm.routed_matmul.default in {node.target for node in exported.graph.nodes}
    assert all(constant.shape != layer.weight.shape for constant in exported.constants.values())
    assert {"weight", "attention", "log_scale"} <= set(exported.state_dict)
    for rows in (2, 70):
        more = torch.randn(rows, 6)
        torch.testing.assert_close(exported.module()(more), expected(layer, more))


@pytest.mark.parametrize("enabled", [False, True])
def test_a_trace_has_the_parameters_and_no_packed_experts(enabled):
    """Packed experts depend on the processor, and a trace can be saved."""
    layer, x = make(), torch.randn(7, 6)
    answer(layer, x)
    with torch.set_grad_enabled(enabled), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(layer, x)
    operators = {node.kind() for node in traced.graph.nodes() if node.kind().startswith("rbm::")}
    assert operators == {"rbm::cosine_topk", "rbm::expert_matmul"}
    with torch.no_grad():
        layer.weight.mul_(2)
    more = torch.randn(3, 6)
    torch.testing.assert_close(traced(more), expected(layer, more))


def test_in_distributed_data_parallel(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer, x = make(), torch.randn(7, 6)
        model = nn.parallel.DistributedDataParallel(layer)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            model.train()
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            model.eval()
            torch.testing.assert_close(answer(model, x), expected(layer, x))
            assert layer._copy is not None
        del model  # before its group, as docs/scale.md says
    finally:
        torch.distributed.destroy_process_group()


def test_meta_device():
    layer = FusedRbMLayer(6, 4, 5, 3, device="meta").eval()
    assert answer(layer, torch.empty(7, 6, device="meta")).shape == (7, 4)
    layer.to_empty(device="cpu").reset_parameters()
    x = torch.randn(7, 6)
    torch.testing.assert_close(answer(layer, x), expected(layer, x))


def test_bad_input():
    layer = make()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"input has shape \[3, 5\], expected \[\.\.\., 6\]"):
            answer(layer, torch.randn(3, 5))
        with pytest.raises(TypeError, match=r"input has dtype torch\.bfloat16, expected torch\.float32"):
            answer(layer, torch.randn(3, 6).bfloat16())
        for layout in (torch.strided, torch.jagged):
            with pytest.raises(TypeError, match="features are a nested tensor, expected a dense one"):
                answer(layer, torch.nested.nested_tensor([torch.randn(3, 6), torch.randn(5, 6)], layout=layout))
