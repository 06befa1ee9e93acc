"""From an operator's call to its kernels: checks, devices, and launches prepared once per shape."""

import re
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from matmul_problems import problem, serving_kernels
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

import triton

import rbm_kernels
from rbm_kernels import _launching, checks, cosine_topk, expert_matmul, expert_order, memory_statistics, memory_update_
from rbm_kernels._library import TRITON_OPERATORS
from rbm_kernels.ops.cosine_topk import op as cosine_topk_op
from rbm_kernels.ops.expert_matmul import launch
from rbm_kernels.ops.expert_matmul import op as expert_matmul_op
from rbm_kernels.ops.routed_matmul import op as routed_matmul_op

SOURCES = [path for path in Path(rbm_kernels.__file__).parent.rglob("*.py") if path.name != "_launching.py"]


def arguments_of_every_operator():
    """Arguments that each Triton operator serves, by name, and the places of its tensors."""
    x, weight, bias, gates, experts, grad = problem((9, 6, 5, 4, 2))
    memory = torch.randn(4, 6, device=x.device)
    routed = gates, experts, gates
    folded = weight, bias, memory, memory[0, :1]
    return {
        "cosine_topk": (x, memory, 2),
        "cosine_topk_backward": (None, gates, x, memory, *routed),
        "expert_order": (experts, 4, 16),
        "expert_matmul": (x, weight, bias, gates, experts),
        "expert_matmul_backward_input": (grad, x, weight, bias, gates, experts),
        "expert_matmul_backward_weight": (grad, x, gates, experts, 4),
        "routed_matmul": (x, memory, weight, bias, 2),
        "fold_experts": folded,
        "fold_experts_backward": (weight, bias, *folded),
        "memory_statistics": (x, gates, experts, 4),
        "memory_update_": (memory, torch.randn_like(memory), torch.rand(4, device=x.device), 0.9),
    }


def test_tensors_on_two_devices_get_a_sentence():
    """A kernel would use it as an address. Each tensor except the first, after a correct call."""
    every = arguments_of_every_operator()
    assert every.keys() == TRITON_OPERATORS.keys()
    for name, arguments in every.items():
        operator = TRITON_OPERATORS[name]
        operator(*arguments)
        names = [argument.name for argument in getattr(torch.ops.rbm, name).default._schema.arguments]
        places = [place for place, argument in enumerate(arguments) if isinstance(argument, torch.Tensor)]
        for place in places[1:]:
            elsewhere = list(arguments)
            elsewhere[place] = elsewhere[place].to("meta")
            first = names[places[0]]
            wanted = (
                f"rbm::{name}: {names[place]} is on meta and {first} on {arguments[places[0]].device}, expected all"
                f" tensors on one device: move one, as {names[place]}.to({first}.device) does"
            )
            with pytest.raises(ValueError, match=re.escape(wanted)):
                operator(*elsewhere)
        operator(*arguments)


def mistakes():
    """Calls with a wrong dtype, shape or number, for the front function and the operator."""
    x, weight, bias, gates, experts, _ = problem((9, 6, 5, 4, 2))
    memory, ops = torch.randn(4, 6, device=x.device), torch.ops.rbm
    for wrong in (
        (x, weight.double(), bias, gates, experts),
        (x, weight[:, :, :5], bias, gates, experts),
        (x, weight, bias[:3], gates, experts),
        (x, weight, bias, gates[:8], experts),
        (x, weight, bias, gates, experts.long()),
        (x[0], weight, bias, gates, experts),
        (x, weight[0], bias, gates, experts),
    ):
        yield partial(expert_matmul, *wrong), partial(ops.expert_matmul, *wrong)
    for wrong in ((x, memory, 5), (x, memory, 0), (x, memory[:, :5], 2), (x, memory.half(), 2), (x[0], memory, 2)):
        yield partial(cosine_topk, *wrong), partial(ops.cosine_topk, *wrong)
    yield partial(cosine_topk, x, memory, 2, temperature=0.0), partial(ops.cosine_topk, x, memory, 2, temperature=0.0)
    for wrong in ((experts.long(), 4, 16), (experts, 1, 16), (experts, 4, 0), (experts[0], 4, 16)):
        yield partial(expert_order, *wrong), partial(ops.expert_order, *wrong)


def test_front_functions_and_operators_raise_alike_where_kernels_serve():
    """Arguments are checked once, in the implementation; both see the same error, again and again."""
    with serving_kernels(TRITON_OPERATORS):
        for front, operator in mistakes():
            for _ in range(2):
                with pytest.raises((TypeError, ValueError)) as by_operator:
                    operator()
                with pytest.raises((TypeError, ValueError)) as by_front:
                    front()
                assert by_front.type is by_operator.type
                assert str(by_front.value) == str(by_operator.value)
                assert str(by_front.value).startswith("rbm::")


# Sizes that nothing else of the call says: the experts, the outputs, the features.
FREE = {
    ("cosine_topk_backward", "memory", "a row less"),
    ("expert_matmul_backward_weight", "grad", "a column less"),
    ("expert_matmul_backward_weight", "x", "a column less"),
}


def test_backward_operators_refuse_what_does_not_fit():
    """Called directly through torch.ops: a kernel would read beyond the tensors."""
    every, refused = arguments_of_every_operator(), 0
    for name in (name for name in every if "backward" in name):
        names = [argument.name for argument in getattr(torch.ops.rbm, name).default._schema.arguments]
        for place, right in enumerate(every[name]):
            if not isinstance(right, torch.Tensor):
                continue
            rows_and_columns = {"a row less": right[:-1], "a column less": right[..., :-1]}
            for mistake, wrong in (rows_and_columns | {"dtype": right.bool(), "rank": right[None]}).items():
                if (name, names[place], mistake) not in FREE:
                    with pytest.raises((TypeError, ValueError), match=rf"^rbm::{name}: "):
                        TRITON_OPERATORS[name](*every[name][:place], wrong, *every[name][place + 1 :])
                    refused += 1
    assert refused > 50


def test_an_order_that_does_not_fit_is_refused():
    every = arguments_of_every_operator()
    experts = every["expert_matmul"][-1]
    for passes in (1, 2):
        order, tile_experts, tile_counts, block_m = expert_order(experts, 4, 4, passes)
        for wrong, message in (
            ((order, None, None, block_m), "expected all that rbm_kernels.expert_order returns"),
            ((order, tile_experts, tile_counts, 0), "order is a tensor and block_m 0"),
            ((order, tile_experts, tile_counts, 2 * block_m), "tile_experts has shape"),
            ((order[..., :-1], tile_experts, tile_counts, block_m), "order has shape"),
            ((order.long(), tile_experts, tile_counts, block_m), "order has dtype int64, expected int32"),
            ((order, tile_experts[..., :-1], tile_counts, block_m), "tile_experts has shape"),
            ((order, tile_experts, tile_counts[..., :-1], block_m), "tile_counts has shape"),
            (
                (order.expand(3, 9) if passes == 1 else order[:0], tile_experts, tile_counts, block_m),
                "passes, expected",
            ),
        ):
            for name in ("expert_matmul", "expert_matmul_backward_input"):
                arguments = every[name] if name == "expert_matmul" else (*every[name], True)
                with pytest.raises((TypeError, ValueError), match=rf"^rbm::{name}: .*{re.escape(message)}"):
                    TRITON_OPERATORS[name](*arguments, *wrong)
        TRITON_OPERATORS["expert_matmul"](*every["expert_matmul"], order, tile_experts, tile_counts, block_m)


def test_more_tiles_than_int32_counts(monkeypatch):
    """A kernel's place in tile_experts is tile * E in int32, and a row's tile * block_m: here int32 ends early."""
    every, order = arguments_of_every_operator(), expert_order(arguments_of_every_operator()["expert_order"][0], 4, 3)
    for name in ("expert_matmul", "expert_matmul_backward_input"):
        arguments = (*every[name], *(True,) * name.endswith("input"))
        message = f"^rbm::{name}: 9 rows in tiles of 3 are 3 tiles of 4 experts, .*: split the batch"
        monkeypatch.setattr(checks, "MOST_SIZE", 11)
        with pytest.raises(ValueError, match=message):
            TRITON_OPERATORS[name](*arguments, *order)
        monkeypatch.setattr(checks, "MOST_SIZE", 12)
        TRITON_OPERATORS[name](*arguments, *order)
    # Rows that come without an order get one before the launch, in tiles of 16 or more.
    monkeypatch.setattr(launch.config, "is_small", lambda *shape: False)
    with pytest.raises(ValueError, match=r"^rbm::expert_matmul: 9 rows in tiles of .*: split the batch"):
        launch.expert_matmul(*every["expert_matmul"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the operators of the CPU")
def test_front_functions_tell_kinds_of_errors_on_the_cpu():
    """The C++ can only raise RuntimeError, with the same message; the functions raise TypeError and ValueError."""
    x, _, _, gates, experts, _ = problem((9, 6, 5, 4, 2))
    sums = torch.randn(4, 6), torch.rand(4)
    ops = torch.ops.rbm
    others = (
        (
            partial(memory_statistics, x, gates, experts.long(), 4),
            partial(ops.memory_statistics, x, gates, experts.long(), 4),
        ),
        (partial(memory_update_, sums[0], *sums, 2.0), partial(ops.memory_update_, sums[0], *sums, 2.0)),
    )
    for front, operator in (*mistakes(), *others):
        with pytest.raises((TypeError, ValueError), match=r"^rbm::"):
            front()
        with pytest.raises(RuntimeError, match=r"^rbm::"):
            operator()


def test_a_combination_is_checked_once(monkeypatch):
    checked = []
    real = expert_matmul_op._check
    bind = rbm_kernels._library.implement_cuda

    def count(*arguments):
        checked.append(arguments)
        real(*arguments)

    monkeypatch.setattr(rbm_kernels._library.LIBRARY, "impl", lambda *_: None)
    monkeypatch.setitem(TRITON_OPERATORS, "expert_matmul", None)
    operator = bind("expert_matmul", count)(lambda *arguments: None)
    x, *rest, _ = problem((9, 6, 5, 4, 2))
    operator(x, *rest)
    operator(x + 1, *rest)
    assert len(checked) == 1
    with pytest.raises(TypeError):
        operator(x.half(), *rest)
    with pytest.raises(TypeError):
        operator(x.half(), *rest)
    assert len(checked) == 3
    operator(x, *rest)
    assert len(checked) == 3


def test_every_kernel_is_launched_in_one_way():
    """By ``launcher``, which sets the compile options of all kernels, and never by ``kernel[grid]``."""
    kernels = {name for path in SOURCES for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M)}
    assert len(kernels) == 21
    launched = set()
    for path in SOURCES:
        text = path.read_text()
        assert not re.search(r"_kernel\[", text), path
        assert "enable_fp_fusion" not in text, path
        for first in re.findall(r"launcher\(([^,]*),", text):
            launched.update(re.findall(r"\w+_kernel\b", first))
    assert launched == kernels
    assert _launching.OPTIONS == {"enable_fp_fusion": True}

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: (grid, args, kwargs)

    said = _launching.launcher(Kernel(), (3,), BLOCK=4, num_warps=8)("tensor", 5)
    assert said == ((3,), ("tensor", 5), {"BLOCK": 4, "num_warps": 8, "enable_fp_fusion": True})

    def registers(num_warps: int, programs: int | None) -> int | None:
        return _launching.launcher(Kernel(), (3,), num_warps=num_warps, programs=programs)()[2].get("maxnreg")

    # 65,536 among the threads of all programs, in eights, and never more than a thread can have.
    given = {(4, 2): 255, (8, 2): 128, (4, 6): 80, (32, 1): 64, (4, None): None}
    assert {those: registers(*those) for those in given} == given


def test_registers_are_not_dealt_out_on_amd(monkeypatch):
    """Triton does not have this option there."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "maxnreg" not in _launching.launcher({(3,): lambda **options: options}, (3,), num_warps=4, programs=2)()


def test_launches_are_prepared_once_for_each_shape():
    x, weight, bias, gates, experts, _ = problem((20, 6, 5, 4, 2))
    for _ in range(2):
        launch.expert_matmul(x, weight, bias, gates, experts)
    assert (launch._prepare_multiply.cache_info().misses, launch._prepare_multiply.cache_info().hits) == (1, 1)
    launch.expert_matmul(x[:19], weight, bias, gates[:19], experts[:19])
    assert launch._prepare_multiply.cache_info().misses == 2
    _launching.forget_prepared()
    assert launch._prepare_multiply.cache_info().currsize == 0


def test_symbols_enter_no_cache():
    """A trace with symbols for the rows goes by the fake implementations, and works for any number of them."""
    with serving_kernels():
        x, weight, bias, gates, experts, _ = problem((20, 6, 5, 4, 2))

        def layer(x, gates, experts):
            return expert_matmul(x, weight, bias, gates, experts)

        traced = make_fx(layer, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x, gates, experts)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (20, 13):
            some = x[:rows], gates[:rows], experts[:rows]
            torch.testing.assert_close(traced(*some), layer(*some))
            torch.testing.assert_close(compiled(*some), layer(*some))


def test_no_autocast_in_what_kernels_leave_to_the_reference():
    """More experts than a tile holds: the reference routes them on CUDA, in float32 all the same."""
    x, memory = torch.randn(9, 6), torch.randn(130, 6)
    expected = cosine_topk_op._cuda(x, memory, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for got, want in zip(cosine_topk_op._cuda(x, memory, 2), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(("stride", "is_copied"), [(2**24 - 1, False), (2**24 + 1, True)])
def test_a_memory_whose_vectors_lie_far_apart_is_copied(stride, is_copied):
    """A tile addresses its 128 vectors with 32 bits; without a copy, the last would begin beyond 2^31 elements."""
    memory = torch.empty_strided((128, 4), (stride, 1), device="meta")
    assert (_launching.addressable(memory).stride(0) == 4) == is_copied


def test_more_choices_than_32_bits_count_are_refused():
    about = (90, "half", 2**29, 16, 16, 4, 8, True, 16, 16)
    with pytest.raises(ValueError, match=r"experts has shape \[536870912, 4\].*split the batch"):
        launch._prepare_weight(*about)


@pytest.mark.parametrize(
    ("shape", "fits"), [((1, 2**11, 2**20 - 8), False), ((1, 2**11 - 1, 2**20), True), ((2**30, 2, 1), False)], ids=str
)
def test_experts_too_large_for_32_bits_are_left_to_the_reference(monkeypatch, shape, fits):
    """The kernels number the weights of one expert in int32: beyond, they would read before the first of them."""
    num_experts, outputs, features = shape
    x, memory = torch.empty(3, features, device="meta"), torch.empty(num_experts, features, device="meta")
    weight, grad = torch.empty(shape, device="meta"), torch.empty(3, outputs, device="meta")
    gates, experts = torch.empty(3, 1, device="meta"), torch.empty(3, 1, dtype=torch.int32, device="meta")
    launched, left = mock.Mock(), mock.Mock(return_value=(None, None))
    monkeypatch.setattr(expert_matmul_op, "_kernels_serve", lambda x: True)
    monkeypatch.setattr(expert_matmul_op, "_launch", lambda: launched)
    for name in ("_eager", "_eager_backward_input", "_eager_backward_weight"):
        monkeypatch.setattr(expert_matmul_op, name, left)
    expert_matmul_op._cuda(x, weight, None, gates, experts)
    expert_matmul_op._cuda_backward_input(grad, x, weight, None, gates, experts)
    expert_matmul_op._cuda_backward_weight(grad, x, gates, experts, num_experts)
    assert (len(launched.mock_calls), len(left.mock_calls)) == ((3, 0) if fits else (0, 3))
    assert routed_matmul_op._kernels_serve(x, memory, weight) == fits


@pytest.mark.parametrize(("num_experts", "fits"), [(65_535, True), (65_536, False)])
def test_the_gradient_of_more_experts_than_a_grid_has_is_left_to_the_reference(monkeypatch, num_experts, fits):
    x, gates = torch.empty(3, 2, device="meta"), torch.empty(3, 1, device="meta")
    launched, left = mock.Mock(), mock.Mock(return_value=(None, None))
    monkeypatch.setattr(expert_matmul_op, "_kernels_serve", lambda x: True)
    monkeypatch.setattr(expert_matmul_op, "_launch", lambda: launched)
    monkeypatch.setattr(expert_matmul_op, "_eager_backward_weight", left)
    expert_matmul_op._cuda_backward_weight(x, x, gates, gates.int(), num_experts)
    assert (launched.backward_weight.called, left.called) == (fits, not fits)


def test_the_next_power_of_two_is_that_of_triton():
    sizes = range(1, 300)
    assert [_launching.next_power_of_2(size) for size in sizes] == [triton.next_power_of_2(size) for size in sizes]
    assert _launching.next_power_of_2(0) == 1, "shapes may be empty"
