"""Packed experts: the results of routed_matmul for every shape of a tile, independent of the batch."""

import os
import threading

import pytest
import routed_problems
import torch
from routed_problems import of_other_strides, problem

from rbm_kernels import pack_experts, quantize_experts, routed_matmul_int8, routed_matmul_packed
from rbm_kernels.ops.packed_experts import reference as packed_reference
from rbm_kernels.ops.routed_matmul import reference

DTYPES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3}
# Each shape exists for a reason: (B, D, N, E, k)
SHAPES = routed_problems.SHAPES | {
    "whole panels, one block": (40, 32, 128, 8, 3),
    "several blocks of the features": (30, 2100, 20, 3, 2),
    "every width of the last panel": (25, 9, 64 + 49, 4, 2),
    "all experts": (9, 4, 3, 3, 3),
    "weights that exceed a cache": (70, 600, 1400, 2, 1),
}


def exact(x, memory, weight, bias, k, temperature):
    wide = (t if t is None else t.double() for t in (x, memory, weight, bias))
    return reference.routed_matmul(*wide, k, temperature)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_answers(shape, dtype):
    x, memory, weight, bias, k = problem(shape, dtype)
    for some_bias in (bias, None):
        packed = pack_experts(weight, some_bias)
        y = routed_matmul_packed(x, memory, packed, shape[2], k, temperature=0.7)
        assert y.dtype == dtype
        wanted = exact(x, memory, weight, some_bias, k, 0.7)
        tolerance = DTYPES[dtype] * (1 + wanted.abs().max().item() if wanted.numel() else 1)
        torch.testing.assert_close(y.double(), wanted, rtol=0, atol=tolerance)
        eager = packed_reference.pack_experts(weight, some_bias)
        by_reference = packed_reference.routed_matmul_packed(x, memory, eager, shape[2], k, 0.7)
        torch.testing.assert_close(by_reference.double(), wanted, rtol=0, atol=2 * tolerance)


@pytest.mark.parametrize("outputs", [10, 128])
@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_any_number_of_threads_gives_the_same_bits(threads, outputs, number):
    """Threads share rows, columns, or both."""
    for rows in (3, 40, 300):
        x, memory, weight, bias, k = problem((rows, 300, outputs, 8, 3), torch.float32)
        packed = pack_experts(weight, bias)
        threads(1)
        alone = routed_matmul_packed(x, memory, packed, outputs, k)
        threads(number)
        assert torch.equal(routed_matmul_packed(x, memory, packed, outputs, k), alone)
        assert torch.equal(pack_experts(weight, bias), packed)


@pytest.mark.native
def test_one_row_wakes_no_second_thread(threads):
    """On busy cores, a single row would wait milliseconds for that thread. Many rows do wake it."""
    x, memory, weight, bias, k = problem((256, 831, 256, 8, 3), torch.float32)
    packed, small, woken = pack_experts(weight, bias), quantize_experts(weight, bias), []

    def ask(rows: int) -> None:  # in a thread of its own, which has woken none yet
        own = str(threading.get_native_id())
        for operator, experts in ((routed_matmul_packed, packed), (routed_matmul_int8, small)):
            operator(x[:rows], memory, experts, 256, k)
            woken.append(len(set(os.listdir("/proc/self/task")) - before - {own}))

    threads(2)
    for rows in (1, 256):
        before = set(os.listdir("/proc/self/task"))  # some of them may end meanwhile, so they are not counted
        asking = threading.Thread(target=ask, args=(rows,))
        asking.start()
        asking.join()
    assert woken == [0, 0, 1, 1]


@pytest.mark.parametrize(("features", "outputs"), [(700, 40), (701, 40), (33, 200), (600, 530)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype, features, outputs):
    x, memory, weight, bias, k = problem((50, features, outputs, 4, 2), dtype)
    packed = pack_experts(weight, bias)
    together = routed_matmul_packed(x, memory, packed, outputs, k)
    for size in (1, 2, 7, 19):
        apart = [routed_matmul_packed(part, memory, packed, outputs, k) for part in x.split(size)]
        assert torch.equal(torch.cat(apart), together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_take_parts_of_many_rows(threads, dtype):
    """Which thread takes which part does not matter."""
    x, memory, weight, bias, k = problem((3000, 40, 24, 3, 2), dtype)
    packed = pack_experts(weight, bias)
    threads(1)
    y = routed_matmul_packed(x, memory, packed, 24, k)
    for count in (2, 3, 8):
        threads(count)
        assert torch.equal(routed_matmul_packed(x, memory, packed, 24, k), y)


@pytest.mark.parametrize("count", range(1, 20))
def test_tiles_of_every_height(count):
    """All rows choose one expert, so its tiles have every height that is made of 1 to 19 rows."""
    x, memory, weight, bias, _ = problem((count, 6, 35, 3, 1), torch.float32)
    memory[0], memory[1:], x = 1.0, -1.0, x.abs()
    y = routed_matmul_packed(x, memory, pack_experts(weight, bias), 35, 1)
    torch.testing.assert_close(y, x @ weight[0].T + bias[0])


def test_what_is_not_finite_stays_with_its_expert():
    x, memory, weight, bias, k = problem((60, 8, 20, 4, 1), torch.float32)
    weight[2, 3, 4], bias[2, 5] = float("nan"), float("inf")
    y = routed_matmul_packed(x, memory, pack_experts(weight, bias), 20, k)
    uses_bad = (torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(memory).T).argmax(1) == 2
    assert 0 < uses_bad.sum() < 60
    assert torch.equal(y.isfinite().all(1), ~uses_bad)
    assert y[uses_bad][:, [c for c in range(20) if c not in (3, 5)]].isfinite().all()


@pytest.mark.parametrize("features", [12, 13])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_stride(dtype, features):
    x, memory, weight, bias, k = problem((20, features, 5, 4, 2), dtype)
    packed = pack_experts(weight, bias)
    expected = routed_matmul_packed(x, memory, packed, 5, k)
    for rows in of_other_strides(x):
        assert torch.equal(routed_matmul_packed(rows, memory.T.contiguous().T, packed, 5, k), expected)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(pack_experts(turned, bias.T.contiguous().T), packed)


@pytest.mark.parametrize("features", [12, 13])
def test_bfloat16_rows_end_before_numbers_that_are_not_finite(features):
    """Pairs of features are read from the rows themselves, which begin at odd places here."""
    x, memory, weight, bias, k = problem((20, features, 5, 4, 2), torch.bfloat16)
    room = torch.full((20, features + 3), float("nan"), dtype=x.dtype)
    room[:, 1:-2] = x
    packed = pack_experts(weight, bias)
    expected = routed_matmul_packed(x, memory, packed, 5, k)
    assert torch.equal(routed_matmul_packed(room[:, 1:-2], memory, packed, 5, k), expected)
    with pytest.raises(RuntimeError, match="what pack_experts returned on this processor"):
        routed_matmul_packed(x, memory, packed, 0, k)


def test_gradients_are_refused_and_not_lost():
    x, memory, weight, bias, k = problem((5, 4, 3, 3, 2), torch.float32)
    with pytest.raises(RuntimeError, match="no derivative of its own"):
        pack_experts(weight.requires_grad_(), bias)
    packed = pack_experts(weight.detach(), bias)
    with pytest.raises(RuntimeError, match="no derivative of its own"):
        routed_matmul_packed(x.requires_grad_(), memory, packed, 3, k)
    with torch.no_grad():
        assert not routed_matmul_packed(x, memory, packed, 3, k).requires_grad
    with torch.inference_mode():
        assert routed_matmul_packed(x, memory, packed, 3, k).is_inference()


BAD = {
    "dtype of packed": ({"packed": lambda t: t.double()}, TypeError, "packed has dtype float64, expected float32"),
    "dtype of memory": ({"memory": lambda t: t.double()}, TypeError, "memory has dtype float64, expected float32"),
    "half": ({"x": lambda t: t.half()}, TypeError, "x has dtype float16, expected float64 or float32 or bfloat16"),
    "features": ({"x": lambda t: t[:, :3]}, ValueError, "memory has shape"),
    "experts": ({"packed": lambda t: t[:2]}, ValueError, "packed has shape"),
    "k": ({"k": lambda k: 9}, ValueError, "k is 9"),
    "outputs": ({"out_features": lambda n: 1000}, ValueError, "out_features is 1000, expected between 0 and"),
    "fewer outputs": ({"out_features": lambda n: 0}, RuntimeError, "what pack_experts returned on this processor"),
    "temperature": ({"temperature": lambda t: 0.0}, ValueError, "temperature is 0"),
    "packed in another order": (
        {"packed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)},
        RuntimeError,
        "packed is not contiguous",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments(changes, error, message):
    x, memory, weight, bias, k = problem((5, 4, 3, 3, 2), torch.float32)
    arguments = {"x": x, "memory": memory, "packed": pack_experts(weight, bias), "out_features": 3, "k": k}
    arguments["temperature"] = 1.0
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    with pytest.raises(error, match=message):
        routed_matmul_packed(**arguments)


def test_bad_experts():
    with pytest.raises(TypeError, match="weight has dtype float16, expected float64 or float32 or bfloat16"):
        pack_experts(torch.zeros(2, 3, 4).half(), None)
    with pytest.raises(ValueError, match=r"weight has shape \[3, 4\], expected \[\*, \*, \*\]"):
        pack_experts(torch.zeros(3, 4), None)
    with pytest.raises(ValueError, match=r"bias has shape \[2, 4\], expected \[2, 3\]"):
        pack_experts(torch.zeros(2, 3, 4), torch.zeros(2, 4))
