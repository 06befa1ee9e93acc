"""Every operator with arguments drawn by hypothesis: it agrees with its reference, or refuses them in one sentence.

``RBM_FUZZ_CASES`` (200) is divided among the operators; ``RBM_FUZZ_SEED`` selects other cases than the default. The
cases run in a separate process, which records each case before running it, so that a crash is reported with its case.

Tolerances: a sum of ``m`` products in a dtype of unit roundoff ``u`` lies within ``(m + 8) u`` times the sum of the
products' absolute values of the exact one. The formulas are sums of products, so that the reference of the absolute
arguments, in float64, is that bound.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import operator_cases as make
import pytest
import torch
from operator_cases import DTYPES, Case

import rbm_kernels
from rbm_kernels.ops.cosine_topk import reference as routing
from rbm_kernels.ops.expert_matmul import reference as matmul
from rbm_kernels.ops.expert_order import reference as order
from rbm_kernels.ops.fold_experts import reference as folding
from rbm_kernels.ops.int8_experts import reference as int8
from rbm_kernels.ops.memory_update import reference as update
from rbm_kernels.ops.sparse_expert_matmul import reference as sparse

CASES = int(os.environ.get("RBM_FUZZ_CASES", "200"))
SEED = os.environ.get("RBM_FUZZ_SEED")
FLOATS = ("float64", "float32")


def check_cosine_topk(case: Case) -> None:
    generator, dtype = case.generator(), DTYPES[case.dtype]
    h = make.laid_out(make.numbers(case, generator, (case.b, case.d), dtype), case.strides[0])
    memory_dtype = torch.float64 if case.wide_memory else torch.float32
    memory = make.laid_out(make.numbers(case, generator, (case.e, case.d), memory_dtype), case.strides[1])
    arguments = {"h": h, "memory": memory, "k": case.k, "temperature": case.temperature}
    outputs = answer_or_refusal(case, rbm_kernels.cosine_topk, arguments, {"h": (1,), "memory": (1,)})
    if outputs is None:
        return
    gates, experts, cosines = outputs
    accumulated = torch.float64 if case.wide_memory else case.accumulated
    roundoff = (case.d + 8) * torch.finfo(accumulated).eps
    every = routing.all_cosines(h.double(), memory.double())
    exact = routing.cosine_topk(h.double(), memory.double(), case.k, case.temperature)
    # A memory vector that is not finite makes every row bad: then only the shape of the result is known.
    good = every.isfinite().all(1)
    assert all(len(set(row)) == case.k for row in experts.tolist())
    assert experts.numel() == 0 or 0 <= int(experts.min()) <= int(experts.max()) < case.e
    within(cosines[good], exact[2][good], roundoff)
    within(every.gather(1, experts.long())[good], exact[2][good], 2 * roundoff)
    within(gates[good], exact[0][good], 4 * roundoff * (1 + 1 / case.temperature))
    grads = [torch.randn(gates.shape, generator=generator, dtype=gates.dtype) for _ in range(2)]
    leaf = h.detach().requires_grad_()
    again = rbm_kernels.cosine_topk(leaf, memory, case.k, temperature=case.temperature)
    assert torch.equal(again[1], experts)
    (found,) = torch.autograd.grad((again[0], again[2]), leaf, grads)
    exact_pair = routing.gates_and_cosines(h.double(), memory.double(), experts, case.temperature)
    wide = [grad.double() for grad in grads]
    truth = routing.backward(
        *wide, h.double(), memory.double(), exact_pair[0], experts, exact_pair[1], case.temperature
    )
    slopes = (wide[1].abs() + wide[0].abs() / case.temperature).sum(1, keepdim=True)
    size = 4 * slopes / h.double().norm(dim=1, keepdim=True).clamp_min(1e-12)
    unit = roundoff * (1 + 1 / case.temperature) + torch.finfo(dtype).eps
    # A row whose length is about EPS may lie on either side of it.
    near = ((h.double().norm(dim=1) / routing.EPS) - 1).abs() < 1e-2
    good = good & ~near
    within(found[good], truth[good], unit * size[good] + 100 * smallest(dtype))


def check_expert_matmul(case: Case) -> None:
    generator, dtype = case.generator(), DTYPES[case.dtype]
    x = make.laid_out(make.numbers(case, generator, (case.b, case.d), dtype), case.strides[0])
    weight = torch.randn(case.e, case.n, case.d, generator=generator, dtype=torch.float64).to(dtype)
    weight = make.laid_out(weight, case.strides[1])
    bias = torch.randn(case.e, case.n, generator=generator, dtype=torch.float64).to(dtype) if case.options[0] else None
    gates, experts = make.gates_and_experts(case, generator)
    arguments = {"x": x, "weight": weight, "bias": bias, "gates": gates, "experts": experts}
    shared = {"x": (0, 1), "weight": (2,), "bias": (0, 1), "gates": (0, 1), "experts": (0, 1)}
    y = answer_or_refusal(case, rbm_kernels.expert_matmul, arguments, shared)
    if y is None:
        return
    tensors = [x, weight, bias, gates]
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(dtype)
    compare_products(
        case,
        lambda x, w, b, g: rbm_kernels.expert_matmul(x, w, b, g, experts),
        lambda x, w, b, g: matmul.expert_matmul(x, w, b, g, experts),
        tensors,
        grad,
        terms=case.d + case.n + case.b + case.k,
    )


def check_sparse_expert_matmul(case: Case) -> None:
    generator, dtype = case.generator(), DTYPES[case.dtype]
    rows = make.csr_rows(case, generator)
    weight = torch.randn(case.e, case.n, case.d, generator=generator, dtype=torch.float64).to(dtype)
    weight = make.laid_out(weight, case.strides[1])
    bias = torch.randn(case.e, case.n, generator=generator, dtype=torch.float64).to(dtype) if case.options[0] else None
    scale = torch.rand(case.e, case.d, generator=generator, dtype=torch.float64).to(dtype) if case.options[1] else None
    gates, experts = make.gates_and_experts(case, generator)
    arguments = dict(zip(("crow", "col", "values"), rows, strict=True))
    arguments |= {"weight": weight, "bias": bias, "scale": scale, "gates": gates, "experts": experts}
    shared = {"crow": (0,), "col": (0,), "values": (0,), "bias": (0, 1), "scale": (0, 1), "gates": (0, 1)}
    y = answer_or_refusal(case, rbm_kernels.sparse_expert_matmul, arguments, shared | {"experts": (0, 1)})
    if y is None:
        return
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(dtype)
    compare_products(
        case,
        lambda w, b, s, g: rbm_kernels.sparse_expert_matmul(*rows, w, b, s, g, experts),
        lambda w, b, s, g: sparse.by_dense_rows(*rows[:2], rows[2].double(), w, b, s, g, experts),
        [weight, bias, scale, gates],
        grad,
        terms=2 * case.d + case.n + case.b + case.k,
        absolute=lambda w, b, s, g: sparse.by_dense_rows(*rows[:2], rows[2].double().abs(), w, b, s, g, experts),
    )


def check_routed_matmul(case: Case) -> None:
    """Compare it with the two operators that it combines, which are tested against their references here."""
    generator, dtype = case.generator(), DTYPES[case.dtype]
    x = make.laid_out(make.numbers(case, generator, (case.b, case.d), dtype), case.strides[0])
    memory_dtype = torch.float64 if case.wide_memory else torch.float32
    memory = make.laid_out(make.numbers(case, generator, (case.e, case.d), memory_dtype), case.strides[1])
    weight = torch.randn(case.e, case.n, case.d, generator=generator, dtype=torch.float64).to(dtype)
    weight = make.laid_out(weight, case.strides[2])
    bias = torch.randn(case.e, case.n, generator=generator, dtype=torch.float64).to(dtype) if case.options[0] else None
    arguments = {"x": x, "memory": memory, "weight": weight, "bias": bias, "k": case.k}
    shared = {"x": (1,), "memory": (0, 1), "weight": (0, 2), "bias": (0, 1)}
    y = answer_or_refusal(case, rbm_kernels.routed_matmul, arguments | {"temperature": case.temperature}, shared)
    if y is None:
        return
    gates, experts, cosines = rbm_kernels.cosine_topk(x, memory, case.k, temperature=case.temperature)
    good = cosines.isfinite().all(1)
    wide = [t.double().abs() if t is not None else None for t in (x, weight, bias)]
    expected = rbm_kernels.expert_matmul(x, weight, bias, gates.to(case.accumulated), experts)
    bound = matmul.expert_matmul(*wide, gates.double(), experts)
    unit = (case.d + case.k + 8) * torch.finfo(case.accumulated).eps + 2 * torch.finfo(dtype).eps
    compare_elements(y[good], expected[good], bound[good], unit, dtype, case.d + case.k)
    if dtype != torch.float16 and memory.dtype == case.accumulated:
        packed = rbm_kernels.pack_experts(weight, bias)
        y = rbm_kernels.routed_matmul_packed(x, memory, packed, case.n, case.k, temperature=case.temperature)
        compare_elements(y[good], expected[good], bound[good], unit, dtype, case.d + case.k)
        if dtype == torch.float32 and min(case.d, case.n) > 0:
            layer = rbm_kernels.NetworkLayer(weight, bias, case.n, case.d, memory, case.k, case.temperature)
            network = rbm_kernels.pack_network([layer])
            torch.testing.assert_close(
                rbm_kernels.packed_network(x, network, case.n), y, rtol=0, atol=0, equal_nan=True
            )
    if dtype == memory.dtype == torch.float32:
        small = rbm_kernels.quantize_experts(weight, bias)
        y = rbm_kernels.routed_matmul_int8(x, memory, small, case.n, case.k, temperature=case.temperature)
        (numbers, row_scale), (weight, scale, bias) = int8.quantize(x), int8.unpack(small, case.n, case.d)
        rounded = (numbers.double() * row_scale, weight.double() * scale[..., None], bias.double())
        expected = matmul.expert_matmul(*rounded, gates.double(), experts)
        bound = matmul.expert_matmul(*(t.abs() for t in rounded), gates.double(), experts)
        compare_elements(y[good], expected[good], bound[good], unit, dtype, case.d + case.k)


def check_expert_order(case: Case) -> None:
    _, experts = make.gates_and_experts(case, case.generator())
    block_m = 1 + case.seed % 40
    arguments = {"experts": experts, "num_experts": case.e, "block_m": block_m}
    got = answer_or_refusal(case, rbm_kernels.expert_order, arguments, {})
    if got is None:
        return
    for one, other in zip(got[:3], order.expert_order(experts, case.e, block_m), strict=True):
        assert torch.equal(one, other)


def check_fold_experts(case: Case) -> None:
    generator, dtype = case.generator(), DTYPES[case.dtype]
    weight = make.laid_out(make.numbers(case, generator, (case.e, case.n, case.d), dtype), case.strides[0])
    bias = make.laid_out(torch.randn(case.e, case.n, generator=generator).to(dtype), case.strides[1])
    attention = make.laid_out(0.3 * torch.randn(case.e, case.d, generator=generator), case.strides[2]).to(dtype)
    log_scale = (0.3 * torch.randn(1, generator=generator)).to(dtype)
    bias, attention = bias if case.options[0] else None, attention if case.options[1] else None
    arguments = {"weight": weight, "bias": bias, "attention": attention, "log_scale": log_scale}
    # The experts are those of the bias or the attention, the outputs of the one and the features of the other.
    agree = {(True, True): (0, 1, 2), (True, False): (0, 1), (False, True): (0, 2), (False, False): ()}[case.options]
    shared = {"weight": agree, "bias": (0, 1), "attention": (0, 1), "log_scale": (0,)}
    outputs = answer_or_refusal(case, rbm_kernels.fold_experts, arguments, shared)
    if outputs is None:
        return
    for rounded, output in zip(rbm_kernels.fold_experts(**arguments, dtype=torch.float16), outputs, strict=True):
        if output is not None:
            torch.testing.assert_close(rounded, output.half(), rtol=0, atol=0, equal_nan=True)

    def numbers_of(fold):
        return lambda *tensors: torch.cat([t.reshape(-1) for t in fold(*tensors) if t is not None])

    grad = torch.randn(sum(t.numel() for t in _tensors(outputs)), generator=generator, dtype=torch.float64).to(dtype)
    tensors, terms = list(arguments.values()), case.e * (case.n + 1) * (case.d + 1)
    compare_products(
        case, numbers_of(rbm_kernels.fold_experts), numbers_of(folding.fold_experts), tensors, grad, terms=terms
    )


def check_memory_update(case: Case) -> None:
    generator, dtype = case.generator(), DTYPES[case.dtype]
    h = make.laid_out(make.numbers(case, generator, (case.b, case.d), dtype), case.strides[0])
    gates, experts = make.gates_and_experts(case, generator)
    normalize = case.options[0]
    arguments = {"h": h, "gates": gates, "experts": experts, "num_experts": case.e, "normalize": normalize}
    shared = {"h": (0,), "gates": (0, 1), "experts": (0, 1)}
    sums = answer_or_refusal(case, rbm_kernels.memory_statistics, arguments, shared)
    if sums is None:
        return
    # Rows whose squared length is no number of the result's dtype are left out; none comes near that border.
    usable = h.to(case.accumulated).square().sum(1).isfinite()
    rows = torch.where(usable[:, None], h.double(), float("nan"))
    exact = update.memory_statistics(rows, gates.double(), experts, case.e, normalize)
    bound = update.memory_statistics(rows.abs(), gates.double(), experts, case.e, normalize)
    unit = (case.b + case.d + 8) * torch.finfo(case.accumulated).eps
    for found, truth, size in zip(sums, exact, bound, strict=True):
        compare_elements(found, truth, size, unit, case.accumulated, case.b)

    memory = make.laid_out(make.numbers(case, generator, (case.e, case.d), case.accumulated), case.strides[1])
    before, decay = memory.double().clone(), 0.25 + 0.5 * (case.seed % 2)
    if case.strides[1] == "expanded" and case.e > 1 and case.d > 0:
        with pytest.raises(ValueError, match="memory has several elements at one address"):
            rbm_kernels.memory_update_(memory, *sums, decay, normalize=normalize)
        return
    rbm_kernels.memory_update_(memory, *sums, decay, normalize=normalize)
    truth, size = before.clone(), before.abs()
    finite = [each.double() for each in sums]
    update.memory_update_(truth, *finite, decay, normalize)
    update.memory_update_(size, finite[0].abs(), finite[1], decay, normalize)
    moved = (finite[1] > 0) & finite[1].isfinite()
    assert torch.equal(memory[~moved].double().nan_to_num(), before[~moved].nan_to_num())
    compare_elements(memory[moved], truth[moved], size[moved], unit, case.accumulated, 4)


CHECKS = {
    "cosine_topk": (check_cosine_topk, tuple(DTYPES)),
    "expert_matmul": (check_expert_matmul, tuple(DTYPES)),
    "sparse_expert_matmul": (check_sparse_expert_matmul, FLOATS),
    "routed_matmul": (check_routed_matmul, tuple(DTYPES)),
    "expert_order": (check_expert_order, FLOATS),
    "fold_experts": (check_fold_experts, tuple(DTYPES)),
    "memory_update": (check_memory_update, tuple(DTYPES)),
}


def crash(case: Case) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("operator", CHECKS)
def test_operator(operator):
    run_cases(operator, max(1, CASES // len(CHECKS)))


def test_a_crash_is_reported_with_its_case():
    with pytest.raises(pytest.fail.Exception, match=r"signal 9 in the case\ncrash: Case\(b=\d+, d=\d+"):
        run_cases("crash", 1)


def run_cases(operator: str, examples: int) -> None:
    """Run this file as a program.

    With a CUDA build of PyTorch, a forked process cannot compute gradients if its parent already has.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "case"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, operator, str(examples), str(written)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode < 0:
            pytest.fail(f"signal {-done.returncode} in the case\n{written.read_text()}", pytrace=False)
        if done.returncode > 0:
            pytest.fail(done.stderr, pytrace=False)


def run_here(operator: str, examples: int, written: Path) -> None:
    check, dtypes = (CHECKS | {"crash": (crash, FLOATS)})[operator]

    @hypothesis.settings(max_examples=examples, deadline=None, database=None, derandomize=SEED is None)
    @hypothesis.given(make.cases(dtypes))
    def every_case(case):
        written.write_text(f"{operator}: {case}")
        check(case)

    if SEED is not None:
        every_case = hypothesis.seed(int(SEED))(every_case)
    every_case()


def answer_or_refusal(case: Case, function, arguments: dict, shared: dict):
    """The result for legal arguments, or None if faulty ones were refused; meta tensors must give the same shapes."""
    if case.fault is not None:
        faulty = make.with_fault(case, arguments, shared)
        if faulty is None:
            return None
        with pytest.raises((ValueError, TypeError, RuntimeError), match=r"^rbm::\w+: \w+ .{20,}"):
            function(**faulty)
        return None
    outputs = function(**arguments)
    meta = function(**{n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in arguments.items()})
    for one, other in zip(_tensors(outputs), _tensors(meta), strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    return outputs


def compare_products(case: Case, operator, formula, tensors, grad, terms: int, absolute=None) -> None:
    """Values and gradients of sums of products, ``operator`` against ``formula`` in float64."""
    unit = (terms + 8) * torch.finfo(case.accumulated).eps + 4 * torch.finfo(DTYPES[case.dtype]).eps
    found = values_and_gradients(operator, tensors, grad)
    exact = values_and_gradients(formula, [None if t is None else t.double() for t in tensors], grad.double())
    sizes = [None if t is None else t.double().abs() for t in tensors]
    bounds = values_and_gradients(absolute or formula, sizes, grad.double().abs())
    # A product may overflow before it meets the small gate or scale that its result has: no factor below one counts.
    reaches = values_and_gradients(
        absolute or formula, [None if t is None else t.clamp_min(1) for t in sizes], grad.double().abs().clamp_min(1)
    )
    for one, truth, bound, reach in zip(found, exact, bounds, reaches, strict=True):
        compare_elements(one, truth, bound, unit, one.dtype, terms, reach)


def values_and_gradients(function, tensors, grad):
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    y = function(*leaves)
    given = [leaf for leaf in leaves if leaf is not None]
    return [y.detach(), *torch.autograd.grad(y, given, grad)]


def compare_elements(found, truth, bound, unit: float, dtype: torch.dtype, terms: int, reach=None) -> None:
    """Where no partial sum can overflow, nor is one of a number that is none: ``reach`` bounds those, or ``bound``."""
    known = bound.isfinite() & ((bound if reach is None else reach) < torch.finfo(dtype).max / 16)
    # A product may fall below the smallest number of the accumulation's dtype.
    within(found[known], truth[known], unit * bound[known] + (terms + 8) * smallest(dtype))


def within(found, truth, allowed) -> None:
    """Check that differences are within ``allowed`` and that the same numbers are NaN."""
    assert torch.equal(found.isnan(), truth.isnan())
    found, truth = found.double().nan_to_num(0.0), truth.double().nan_to_num(0.0)
    error = (found - truth).abs()
    assert bool((error <= allowed).all()), f"error {float((error / allowed).max()):.3g} of what is allowed"


def smallest(dtype: torch.dtype) -> float:
    """The unit of the denormal numbers, of float32 at least where sums are of it."""
    info = torch.finfo(dtype)
    return max(info.tiny * info.eps, 0.0 if dtype == torch.float64 else math.ldexp(1.0, -126))


def _tensors(outputs) -> list:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [output for output in outputs if isinstance(output, torch.Tensor)]


if __name__ == "__main__":
    run_here(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
