"""Every peer has the same results and gradients as ours; adapters run with fake and with real libraries.

Real libraries are used if they are installed, in Triton's interpreter if there is no GPU.
"""

import sys
from unittest import mock

import fake_libraries
import pytest
import torch
from fake_libraries import installed
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from benchmarks.measure.harness import relative_error
from benchmarks.measure.shapes import ROUTINGS, Problem, Shape, Workload, clear_rows
from benchmarks.peers import SortedRbMLayer, SplitRbMLayer, TunedRbMLayer, cpu_servers, ffn_peers, libraries, peers
from benchmarks.peers.experts import grouped_mm, sort_pairs, sorted_addmm
from benchmarks.peers.ffn import eager_ffn
from benchmarks.report import tables
from rbm.nn.reference import ReferenceRbMLayer
from rbm_kernels.ops.expert_matmul import reference

# bfloat16 has 8 bits: an error of one rounding of every sum, and of the values that are summed.
ERRORS = {"float32": 1e-6, "bfloat16": 1e-2}
SMALL = Shape(50, 16, 8, 4, 2)
PLAIN = ("eager", "split", "sorted", "grouped_mm", "dense")
FFNS = ("rbm", "rbm, rows copied", "eager", "grouped_mm")
ADAPTERS = [(library.name, kind) for library in libraries.LIBRARIES for kind in library.computes]


def experts_case(workload: Workload) -> tuple[list[Tensor], Tensor]:
    """What an expert matmul takes, and the gradient of its result."""
    p = Problem.of(workload, "cpu")
    return [p.x, p.weight, p.bias, p.gates, p.experts], p.grad


def ffn_case(workload: Workload) -> tuple[list[Tensor], Tensor]:
    """What an FFN takes, ``outputs`` hidden features wide, and the gradient of its result."""
    p, shape = Problem.of(workload, "cpu"), workload.shape
    wide = {"dtype": p.x.dtype, "requires_grad": True}
    up = torch.randn(shape.experts, 2 * shape.outputs, shape.features, **wide)
    down = torch.randn(shape.experts, shape.features, shape.outputs, **wide)
    return [p.x, up, down, p.gates, p.experts], torch.randn_like(p.x)


CASES = {"experts": (experts_case, reference.expert_matmul), "ffn": (ffn_case, eager_ffn)}


def assert_right(peer, kind: str, workload: Workload, *, backward: bool = True) -> None:
    """The result and every gradient against float64, by norms."""
    make, exact = CASES[kind]
    arguments, grad = make(workload)
    *leaves, chosen = arguments
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = exact(*wide, chosen)
    if backward:
        y = peer(*arguments)
        got = (y, *torch.autograd.grad(y, leaves, grad))
        expected = (expected, *torch.autograd.grad(expected, wide, grad.double()))
    else:
        with torch.no_grad():
            y, got, expected = (y := peer(*arguments)), (y,), (expected.detach(),)
    assert y.dtype == arguments[0].dtype
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        assert relative_error([one], [other]) < ERRORS[workload.precision]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_peers_are_right(name, routing):
    assert_right(peers(torch.float32, compiled=False)[name], "experts", Workload(SMALL, "float32", routing))


@pytest.mark.parametrize("name", FFNS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_ffns_are_right(name, precision):
    assert_right(ffn_peers(compiled=False)[name], "ffn", Workload(SMALL, precision))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [Shape(30, 1_433, 47, 4, 2), Shape(30, 13, 8, 4, 3), Shape(7, 8, 5, 33, 8)], ids=str)
def test_grouped_mm_serves_odd_widths(shape, precision):
    """PyTorch's function refuses rows that are not multiples of 16 bytes, so the adapter must pad them."""
    assert_right(grouped_mm, "experts", Workload(shape, precision))


def test_order_of_pairs_is_that_of_a_count():
    experts = torch.randint(2, 6, (40, 3), dtype=torch.int32)  # experts 0, 1, 6 and 7 have none
    pairs, ends = sort_pairs(experts, 8)
    assert torch.equal(ends.long(), torch.bincount(experts.flatten(), minlength=8).cumsum(0))
    assert torch.equal(pairs, experts.flatten().argsort(stable=True))
    assert ends.dtype == torch.int32


def test_grouped_mm_never_asks_the_host():
    """Tensors without values stop whatever needs one on the host: what a CUDA graph cannot hold."""
    with FakeTensorMode():
        arguments, grad = experts_case_without_values()
        y = grouped_mm(*arguments)
        torch.autograd.grad(y, arguments[:4], grad)
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            sorted_addmm(*arguments)


def experts_case_without_values() -> tuple[list[Tensor], Tensor]:
    """As :func:`experts_case`, at :data:`SMALL`, of tensors that have a shape alone."""
    b, d, n, e, k = SMALL.rows, SMALL.features, SMALL.outputs, SMALL.experts, SMALL.top_k
    half = {"dtype": torch.bfloat16}
    leaves = [torch.empty(size, **half, requires_grad=True) for size in ((b, d), (e, n, d), (e, n))]
    gates, experts = torch.empty(b, k, requires_grad=True), torch.empty((b, k), dtype=torch.int32)
    return [*leaves, gates, experts], torch.empty(b, n, **half)


# --- libraries --------------------------------------------------------------------------------------------------------

FAKES = {
    ("scattermoe", "experts"): (fake_libraries.scattermoe, "float32"),
    ("scattermoe", "ffn"): (fake_libraries.scattermoe, "float32"),
    ("liger_kernel", "ffn"): (fake_libraries.liger_kernel, "float32"),
    ("megablocks", "experts"): (fake_libraries.megablocks, "bfloat16"),
    ("tutel", "experts"): (fake_libraries.tutel, "float32"),
    ("sonicmoe", "ffn"): (fake_libraries.sonicmoe, "bfloat16"),
}


@pytest.mark.parametrize(("name", "kind"), FAKES)
@pytest.mark.parametrize("shape", [SMALL, Shape(9, 16, 8, 5, 1)], ids=str)
def test_adapters_give_a_library_what_it_wants(name, kind, shape):
    fake, precision = FAKES[name, kind]
    with installed(name, fake()) as adapter:
        assert_right(getattr(adapter, kind), kind, Workload(shape, precision))


@pytest.mark.parametrize(
    "fake",
    [
        fake_libraries.triton_kernels,
        fake_libraries.triton_kernels_before,
        fake_libraries.triton_kernels_of_vllm,
    ],
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_triton_kernels_of_every_generation(fake, precision):
    with installed("triton_kernels", fake()) as adapter:
        assert_right(adapter.experts, "experts", Workload(SMALL, precision), backward=False)
        arguments, _ = experts_case(Workload(SMALL, precision))
        with pytest.raises(NotImplementedError, match="no backward"):
            adapter.experts(*arguments)


def test_every_library_has_a_fake_and_a_column():
    assert {*FAKES, ("triton_kernels", "experts")} == set(ADAPTERS)
    assert tuple(library.name for library in libraries.LIBRARIES) == tables.LIBRARIES


@pytest.mark.parametrize(("name", "kind"), [("megablocks", "experts"), ("sonicmoe", "ffn")])
def test_what_a_library_does_not_compute_is_refused(name, kind):
    with installed(name, FAKES[name, kind][0]()) as adapter:
        arguments, _ = CASES[kind][0](Workload(SMALL, "float32"))
        with pytest.raises(NotImplementedError, match=name):
            getattr(adapter, kind)(*arguments)


def test_scattermoe_multiplies_as_the_suite_says():
    arguments, _ = experts_case(Workload(SMALL, "float32"))
    with installed("scattermoe", fake_libraries.scattermoe()) as adapter:
        adapter.experts(*arguments)
        assert adapter.ops.ALLOW_TF32 is False
        torch.set_float32_matmul_precision("high")
        try:
            adapter.experts(*arguments)
        finally:
            torch.set_float32_matmul_precision("highest")
        assert adapter.ops.ALLOW_TF32 is True


@pytest.mark.parametrize(("name", "kind"), ADAPTERS)
def test_installed_libraries_are_right(name, kind, device):
    """The real libraries, in Triton's interpreter."""
    if device != "cpu":
        pytest.skip("the suites check it on a GPU before they time it")
    missing = [line for line in libraries.missing_libraries() if line.startswith(f"{name} ")]
    if missing:
        pytest.skip(missing[0])
    assert_right(libraries.usable(kind)[name], kind, Workload(Shape(40, 32, 16, 4, 2), "float32"))


@pytest.mark.parametrize(("name", "precision"), [("vllm", "float32"), ("ggml", "float32"), ("ggml", "bfloat16")])
def test_experts_of_servers_are_right(name, precision):
    """On a CPU, with the packed weights and the number of rows of a previous call; they have no backward pass."""

    def peer(x: Tensor, up: Tensor, down: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        found = cpu_servers.prepared(up, down)
        if name not in found:
            pytest.skip(f"{name} is not at hand (RBM_PEER_LIBRARIES)")
        found[name](x[:3], gates[:3], experts[:3])
        return found[name](x, gates, experts)

    assert_right(peer, "ffn", Workload(Shape(40, 64, 32, 4, 2), precision), backward=False)


def test_missing_libraries_are_named_with_their_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with installed("liger_kernel", fake_libraries.liger_kernel()):
        assert "liger_kernel (needs a GPU)" in libraries.missing_libraries()
        assert "liger_kernel" not in libraries.usable("ffn")
        libraries._missing.cache_clear()
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert "liger_kernel" in libraries.usable("ffn")
        assert "liger_kernel" in ffn_peers(compiled=False)
    monkeypatch.setitem(sys.modules, "tutel", None)
    libraries._missing.cache_clear()
    assert any(line.startswith("tutel (") for line in libraries.missing_libraries())


def test_somebody_elses_triton_kernels_is_not_taken():
    """The package with this name on PyPI has no matmul."""
    fake = {"triton_kernels": {"add_vectors": lambda a, b: a + b}}
    with pytest.raises(ModuleNotFoundError), installed("triton_kernels", fake):
        pass


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", [SplitRbMLayer, SortedRbMLayer])
@pytest.mark.parametrize("training", [True, False])
def test_peer_layers_are_the_layer(peer, training):
    torch.manual_seed(1)
    layers = [kind(16, 8, 4, 2).train(training) for kind in (ReferenceRbMLayer, peer)]
    with torch.no_grad():
        layers[0].attention.normal_()
    layers[1].load_state_dict(layers[0].state_dict())
    layers[1].train(training)
    if peer is SortedRbMLayer:
        assert (layers[1].folded is None) == training, "what serves does not fold for each answer"
    x = clear_rows(60, layers[0].memory, 2)
    with mock.patch("rbm_kernels.ops.cosine_topk.reference.cosine_topk", side_effect=AssertionError("routes slowly")):
        y = layers[1](x)
    torch.testing.assert_close(y, layers[0](x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layers[1].memory, layers[0].memory)


@pytest.mark.parametrize("rows", [60, 600])
def test_tuned_layer_is_the_layer(rows):
    """Run without a compiler; the suite checks the compiled code before it is timed."""
    layers = [kind(16, 8, 4, 2) for kind in (ReferenceRbMLayer, TunedRbMLayer)]
    with torch.no_grad():
        layers[0].attention.normal_()
    layers[1].load_state_dict(layers[0].state_dict())
    x = clear_rows(rows, layers[0].memory, 2)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(layers[1].eval()(x), layers[0].eval()(x), rtol=1e-4, atol=1e-5)
