"""The Triton kernels that fold experts, in Triton's interpreter without a GPU, and as compiled code."""

import pytest
import torch
from folded_problems import SHAPES, check, problem, results
from known_triton import MOST_SPILLED

pytest.importorskip("triton")

from triton_on_cpu import serving_kernels

from benchmarks.compiled.cases import ARCHITECTURES, CASES
from benchmarks.compiled.everywhere import compiled_everywhere
from rbm_kernels import fold_experts
from rbm_kernels.ops.fold_experts import launch, op
from rbm_kernels.ops.fold_experts.config import choose_tile

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def launched(*arguments, dtype=None):
    """Results and gradients of a problem by the launch functions."""
    return *launch.fold_experts(*arguments[:4], dtype), *launch.backward(*arguments[4:], *arguments[:4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.usefixtures("poisoned_empty")
def test_shapes(shape, dtype, device):
    arguments = problem(shape, dtype, device=device)
    got = launched(*arguments)
    check(got, *arguments)
    assert all(torch.equal(a, b) for a, b in zip(got, launched(*arguments), strict=True))


@pytest.mark.parametrize("attention", [True, False], ids=["attention", "no attention"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(3, 37, 29), (2, 150, 70)], ids=str)
@pytest.mark.usefixtures("poisoned_empty")
def test_options(shape, bias, attention, device):
    arguments = problem(shape, bias=bias, attention=attention, device=device)
    check(launched(*arguments), *arguments)


@pytest.mark.parametrize(("dtype", "folded"), [(a, b) for a in DTYPES for b in DTYPES if a != b], ids=str)
@pytest.mark.usefixtures("poisoned_empty")
def test_dtype_of_the_result(dtype, folded, device):
    """A number is rounded once: a folded weight of bfloat16 parameters in float32 was never bfloat16."""
    arguments = problem((2, 20, 70), dtype, folded=folded, device=device)
    check(launched(*arguments, dtype=folded), *arguments, dtype=folded)


STRIDES = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "every other": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "shifted by one": lambda t: torch.cat([t[..., :1], t], -1)[..., 1:],
    "one expert for all": lambda t: t[:1].expand(t.shape),
}


@pytest.mark.parametrize("view", STRIDES.values(), ids=STRIDES.keys())
@pytest.mark.usefixtures("poisoned_empty")
def test_strides(view, device):
    arguments = [view(t) if t.dim() > 1 else t for t in problem((3, 37, 40), device=device)]
    assert not any(t.is_contiguous() for t in arguments if t.dim() > 1)
    check(launched(*arguments), *arguments)


def test_a_scalar_scale(device):
    weight, bias, attention, log_scale, *grads = problem((3, 20, 40), device=device)
    got = launched(weight, bias, attention, log_scale[0], *grads)
    assert got[-1].shape == ()
    expected = launched(weight, bias, attention, log_scale, *grads)
    assert all(torch.equal(a, b.view(a.shape)) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("scale", [0.5, 5.0, float("inf"), float("-inf")])
def test_clamped_logarithms(scale, device):
    arguments = problem((3, 20, 40), device=device)
    attention, log_scale = arguments[2:4]
    attention[0, 3], attention[1, 39], attention[2, 7] = 5.0, float("inf"), float("-inf")
    log_scale.fill_(scale)
    got = launched(*arguments)
    check(got, *arguments)
    assert (got[4][[0, 1, 2], [3, 39, 7]] == 0).all()
    if scale > 0.5:
        assert got[5].item() == 0


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter
def test_nan_stays_where_it_is(device):
    """In the attention it spoils its own column, and the scale's gradient; in the scale everything but its gradient."""
    arguments = problem((3, 20, 40), device=device)
    arguments[2][1, 5] = float("nan")
    got = launched(*arguments)
    check(got, *arguments)  # NaN where eager PyTorch has it
    for of_weight in (got[0], got[2]):
        assert of_weight[1, :, 5].isnan().all()
        assert of_weight.isnan().sum() == 20
    assert got[4][1, 5] == 0
    arguments = problem((3, 20, 40), device=device)
    arguments[3].fill_(float("nan"))
    check(launched(*arguments), *arguments)
    arguments = problem((3, 20, 40), device=device)
    arguments[0][2, 3, 4] = float("inf")
    check(launched(*arguments), *arguments)


@pytest.mark.parametrize("options", [True, False])
def test_the_operator_calls_the_kernels(options, device):
    if device != "cpu":
        pytest.skip("tests/gpu does this")
    arguments = problem((3, 20, 40), torch.bfloat16, bias=options, attention=options, folded=torch.float32)
    with serving_kernels() as calls:
        got = results(fold_experts, *arguments, dtype=torch.float32)
    assert calls == {"fold_experts": 1, "fold_experts_backward": 1}
    expected = launched(*arguments, dtype=torch.float32)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 5, 4), torch.float64), ((0, 5, 4), torch.float32), ((3, 5, 0), torch.float32)], ids=str
)
def test_what_is_left_to_the_reference(shape, dtype, device, monkeypatch):
    """float64, and what is empty: of features alone, then the bias is still folded."""
    monkeypatch.setattr(launch, "_prepare", None)
    arguments = problem(shape, dtype, device=device)
    got = *op._cuda(*arguments[:4]), *op._cuda_backward(*arguments[4:], *arguments[:4])
    check(got, *arguments)


@pytest.mark.parametrize("place", [0, 1], ids=["weight", "bias"])
def test_a_gradient_of_one_result(place, device):
    arguments = problem((3, 5, 4), device=device)
    grads = [t if i == place else None for i, t in enumerate(arguments[4:])]
    zeros = [t if i == place else torch.zeros_like(t) for i, t in enumerate(arguments[4:])]
    got = op._cuda_backward(*grads, *arguments[:4])
    torch.testing.assert_close(got, launch.backward(*zeros, *arguments[:4]))


@pytest.mark.parametrize("backward", [True, False])
def test_tiles(backward):
    """Powers of two from 16, of 64 adjacent bytes or more where there are as many, and no larger than the shape."""
    for outputs in (1, 16, 47, 256, 5000):
        for features in (1, 17, 64, 256, 8415):
            tile = choose_tile(outputs, features, backward=backward)
            for block, size in ((tile.block_n, outputs), (tile.block_d, features)):
                assert block >= 16
                assert block & (block - 1) == 0
                assert block <= max(16, 2 * size - 1)
            assert tile.block_d >= min(32, features)
            assert tile.block_n * tile.block_d <= 4096


def test_the_registered_functions_check_what_the_eager_ones_check(device):
    weight, bias, attention, log_scale, *grads = problem((3, 5, 4), device=device)
    with pytest.raises(ValueError, match=r"^rbm::fold_experts: attention has shape \[3, 3\], expected \[3, 4\]"):
        op._cuda(weight, bias, attention[:, :3], log_scale)
    with pytest.raises(TypeError, match=r"^rbm::fold_experts: dtype is int8"):
        op._cuda(weight, bias, attention, log_scale, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"^rbm::fold_experts_backward: grad_bias has shape \[2, 5\]"):
        op._cuda_backward(grads[0], grads[1][:2], weight, bias, attention, log_scale)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_code(architecture):
    rows = compiled_everywhere("fold_experts")[architecture]
    cases = sum(case.operator == "fold_experts" for case in CASES)
    for kernel in ("fold_experts_fwd_kernel", "fold_experts_bwd_kernel"):
        assert sum(row.kernel == kernel for _, row in rows) == cases
    assert len(rows) == 2 * cases
    for case, row in rows:
        assert row.spilled_bytes <= MOST_SPILLED, row
        assert row.atomics == 0, row
        assert case.in_features % 8 or row.wide_loads > 0, row
