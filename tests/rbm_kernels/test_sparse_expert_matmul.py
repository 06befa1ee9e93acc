"""The grouped matmul over sparse rows: meaning, derivatives, bad indices, threads, contracts of an operator."""

import pytest
import torch

from rbm_kernels import expert_matmul, sparse_expert_matmul
from rbm_kernels.ops.sparse_expert_matmul import reference

# Each shape exists for a reason: (B, D, N, E, k, density)
SHAPES = {
    "usual": (90, 70, 40, 8, 3, 0.3),
    "no rows": (0, 16, 8, 4, 2, 0.3),
    "no outputs": (9, 16, 0, 4, 2, 0.3),
    "no features": (9, 0, 8, 4, 2, 0.3),
    "one of each": (1, 1, 1, 1, 1, 1.0),
    "no entries": (9, 12, 5, 4, 2, 0.0),
    "few entries, served in place": (4, 900, 33, 4, 2, 0.005),
    "a cache line of outputs": (50, 30, 16, 4, 2, 0.2),
    "one block of outputs and one more": (60, 37, 129, 5, 2, 0.3),
    "every expert": (40, 20, 9, 3, 3, 0.4),
    "no choice": (7, 6, 4, 3, 0, 0.5),
}
DTYPES = [torch.float64, torch.float32]


def make(shape, dtype=torch.float64, with_options=True):
    b, d, n, e, k, density = shape
    x = torch.randn(b, d, dtype=dtype) * (torch.rand(b, d) < density)
    matrix = x.to_sparse_csr()
    parts = (matrix.crow_indices().int(), matrix.col_indices().int(), matrix.values().clone())
    weight = torch.randn(e, n, d, dtype=dtype)
    bias = torch.randn(e, n, dtype=dtype) if with_options else None
    scale = torch.rand(e, d, dtype=dtype) + 0.5 if with_options else None
    gates = torch.rand(b, k, dtype=dtype)
    experts = torch.rand(b, e).argsort(-1)[:, :k].int()
    return x, (*parts, weight, bias, scale, gates, experts)


@pytest.mark.parametrize("implementation", ["operator", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_options", [True, False], ids=["bias and scale", "bare"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_dense_operator(shape, with_options, dtype, implementation):
    """In float64, which the dense operator's tests measure against its own reference; every gradient."""
    x, (*parts, weight, bias, scale, gates, experts) = make(shape, dtype, with_options)
    parameters = {"weight": weight, "bias": bias, "scale": scale, "gates": gates}
    wide = {name: t.double().requires_grad_() for name, t in parameters.items() if t is not None}
    folded = wide["weight"] * wide["scale"][:, None, :] if with_options else wide["weight"]
    expected = expert_matmul(x.double(), folded, wide.get("bias"), wide["gates"], experts)
    grad = torch.randn_like(expected)
    truths = dict(zip(wide, torch.autograd.grad(expected, list(wide.values()), grad), strict=True))

    if implementation == "reference":
        y = reference.sparse_expert_matmul(*parts, **parameters, experts=experts)
        grad_weight, grad_scale = reference.backward_weight(grad.to(dtype), *parts, weight, scale, gates, experts)
        grad_gates = reference.backward_gates(grad.to(dtype), *parts, **parameters, experts=experts)
        grads = {"weight": grad_weight, "gates": grad_gates, **({"scale": grad_scale} if with_options else {})}
    else:
        leaves = {name: t.requires_grad_() for name, t in parameters.items() if t is not None}
        y = sparse_expert_matmul(*parts, **parameters, experts=experts)
        grads = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), grad.to(dtype)), strict=True))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)
    for name, got in grads.items():
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), truths[name], atol=tolerance, rtol=tolerance, msg=name)


def test_gradcheck():
    _, (*parts, weight, bias, scale, gates, experts) = make((6, 5, 3, 4, 2, 0.4))
    leaves = [t.requires_grad_() for t in (weight, bias, scale, gates)]
    assert torch.autograd.gradcheck(lambda *p: sparse_expert_matmul(*parts, *p, experts), leaves)


def test_autocast_rounds_no_gradient():
    _, (*parts, weight, bias, scale, gates, experts) = make(SHAPES["usual"], torch.float32)
    leaves = [tensor.requires_grad_() for tensor in (weight, bias, scale, gates)]
    y = sparse_expert_matmul(*parts, *leaves, experts)
    grad = torch.randn_like(y)
    exact = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, torch.autograd.grad(y, leaves, grad), exact))


def test_entries_in_any_order_and_repeated_ones_add_up():
    _, arguments = make((1, 10, 4, 2, 1, 0.0), torch.float64)
    x = torch.zeros(1, 10, dtype=torch.float64)
    x[0, 7], x[0, 2] = 3.0, -1.0
    crow, col = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([7, 2, 7], dtype=torch.int32)
    values = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    _, _, _, weight, bias, scale, gates, experts = arguments
    expected = expert_matmul(x, weight * scale[:, None, :], bias, gates, experts)
    torch.testing.assert_close(sparse_expert_matmul(crow, col, values, weight, bias, scale, gates, experts), expected)


def test_strided_arguments():
    """A slice of a wider weight, as beside dense columns, weights with features apart, and everything else expanded."""
    _, (*parts, weight, _, _, gates, experts) = make(SHAPES["usual"])
    e, n, d = weight.shape
    wider = torch.randn(e, n, d + 3, dtype=torch.float64)
    scale, bias = torch.rand(d + 3, dtype=torch.float64).expand(e, -1), torch.rand(n, dtype=torch.float64).expand(e, -1)
    apart = weight.mT.contiguous().mT
    for candidate in (wider[:, :, :d], apart):
        strided = (candidate, bias, scale[:, :d], gates.T.contiguous().T, experts.T.contiguous().T)
        expected = sparse_expert_matmul(*parts, *(t.contiguous() for t in strided))
        assert torch.equal(sparse_expert_matmul(*parts, *strided), expected)
        leaves = [t.clone() if t.dtype == torch.int32 else t.detach().requires_grad_() for t in strided]
        sparse_expert_matmul(*parts, *leaves).sum().backward()
        assert leaves[0].grad.shape == candidate.shape


def test_same_bits_from_any_number_of_threads(threads):
    _, arguments = make((700, 300, 140, 8, 3, 0.05), torch.float32)
    grad = torch.randn(700, 140)
    *parts, weight, _, scale, gates, experts = arguments
    weight_arguments = (grad, *parts, weight, scale, gates, experts)
    seen = []
    for count in (1, 1, 2, 2, 5):
        threads(count)
        y = torch.ops.rbm.sparse_expert_matmul(*arguments)
        grad_gates = torch.ops.rbm.sparse_expert_matmul_backward_gates(grad, *arguments)
        seen.append([y, grad_gates, *torch.ops.rbm.sparse_expert_matmul_backward_weight(*weight_arguments)])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def test_rows_do_not_know_each_other():
    """Splitting a batch changes no bit of a row, served in place or through transposed weights."""
    _, arguments = make((300, 400, 24, 4, 2, 0.02), torch.float64)
    crow, col, values, weight, bias, scale, gates, experts = arguments
    whole = sparse_expert_matmul(*arguments)
    for b in (0, 17, 299):
        first, last = crow[b : b + 2].tolist()
        one = torch.tensor([0, last - first], dtype=torch.int32)
        row = (one, col[first:last], values[first:last], weight, bias, scale, gates[b : b + 1], experts[b : b + 1])
        torch.testing.assert_close(sparse_expert_matmul(*row)[0], whole[b])


OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("with_options", [True, False])
def test_opcheck(with_options):
    _, arguments = make((6, 5, 3, 4, 2, 0.4), with_options=with_options)
    *parts, weight, bias, scale, gates, experts = arguments
    grad = torch.randn(6, 3, dtype=torch.float64)
    weights = (weight, bias, scale, gates)
    leaves = [None if t is None else t.clone().requires_grad_() for t in weights]
    torch.library.opcheck(torch.ops.rbm.sparse_expert_matmul, (*parts, *leaves, experts), test_utils=OPCHECKS)
    torch.library.opcheck(torch.ops.rbm.sparse_expert_matmul_backward_gates, (grad, *arguments), test_utils=OPCHECKS)
    weight_arguments = (grad, *parts, weight, scale, gates, experts)
    torch.library.opcheck(torch.ops.rbm.sparse_expert_matmul_backward_weight, weight_arguments, test_utils=OPCHECKS)


def changed(position, value):
    def change(arguments):
        arguments = list(arguments)
        arguments[position] = value(arguments[position])
        return arguments

    return change


def with_entry(value):
    def write(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[1] = value
        return tensor

    return write


BAD = {
    "col": (changed(1, with_entry(70)), RuntimeError, "col holds 70, expected between 0 and 69"),
    "negative col": (changed(1, with_entry(-1)), RuntimeError, "col holds -1"),
    "experts": (changed(7, with_entry(8)), RuntimeError, "experts holds 8 in row 0, expected between 0 and 7"),
    "crow": (changed(0, with_entry(10_000)), RuntimeError, "crow does not rise from 0 to the number of entries"),
    "long col": (changed(1, lambda t: t.long()), TypeError, "col has dtype int64, expected int32"),
    "dtype": (changed(3, lambda t: t.float()), TypeError, "weight has dtype float32, expected float64"),
    "scale": (changed(5, lambda t: t[:, 1:]), ValueError, r"scale has shape \[8, 69\], expected"),
    "bias": (changed(4, lambda t: t[1:]), ValueError, r"bias has shape \[7, 40\], expected"),
    "rows": (changed(0, lambda t: t[:-1]), ValueError, r"crow has shape \[90\], expected \[91\]"),
}


@pytest.mark.parametrize(("change", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments(change, error, message):
    _, arguments = make(SHAPES["usual"])
    with pytest.raises(error, match=message):
        sparse_expert_matmul(*change(arguments))


@pytest.mark.parametrize(
    ("change", "error", "message"), [BAD[name] for name in ("long col", "dtype", "scale", "bias", "rows")]
)
def test_bad_arguments_of_the_reference(change, error, message):
    """Without a library: the same messages, also on the meta device."""
    _, arguments = make(SHAPES["usual"])
    with pytest.raises(error, match=message):
        sparse_expert_matmul(*(t.to("meta") for t in change(arguments)))
