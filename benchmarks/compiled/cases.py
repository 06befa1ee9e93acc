"""Shapes at which the kernels are compiled, counted and tuned, shared by the static report, its tests and the tuner.

To add a case, add a line to ``CASES``. To add an operator, add a function to ``LAUNCHES`` and, if its configuration
claims a number of programs per multiprocessor, a line to ``claimed_programs``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.measure.device import REHEARSES
from benchmarks.measure.precision import DTYPES, multiplying_as
from rbm_kernels._launching import Machine
from rbm_kernels.ops.cosine_topk import config as cosine_topk_config
from rbm_kernels.ops.cosine_topk import launch as cosine_topk_launch
from rbm_kernels.ops.expert_matmul import config as expert_matmul_config
from rbm_kernels.ops.expert_matmul import launch as expert_matmul_launch
from rbm_kernels.ops.expert_order import expert_order
from rbm_kernels.ops.expert_order import launch as expert_order_launch
from rbm_kernels.ops.fold_experts import launch as fold_experts_launch
from rbm_kernels.ops.memory_update import config as memory_update_config
from rbm_kernels.ops.memory_update import launch as memory_update_launch
from rbm_kernels.ops.routed_matmul import launch as routed_matmul_launch

ARCHITECTURES = (80, 90, 100, 120)


@dataclass(frozen=True)
class Case:
    """An operator at one shape and precision; ``tf32`` means float32 multiplied as TensorFloat-32."""

    operator: str
    precision: str
    rows: int = 169_343
    in_features: int = 256
    out_features: int = 256
    num_experts: int = 8
    top_k: int = 3

    def __str__(self) -> str:
        """Symbols as in ``rbm_kernels.ops``; without N if nothing is multiplied, without D if no rows are read."""
        only_d = f"D={self.in_features:,} "
        features = {"expert_order": "", "cosine_topk": only_d, "memory_update": only_d}.get(
            self.operator, f"{only_d}N={self.out_features:,} "
        )
        return f"B={self.rows:,} {features}E={self.num_experts} k={self.top_k}"


MANY = {"num_experts": 64, "top_k": 8}
CASES = (
    *(Case("cosine_topk", precision) for precision in ("float32", "float16", "bfloat16")),
    Case("cosine_topk", "bfloat16", in_features=1433),
    Case("cosine_topk", "bfloat16", in_features=8415),
    Case("cosine_topk", "float32", in_features=8415),
    Case("cosine_topk", "float32", **MANY),
    Case("cosine_topk", "bfloat16", **MANY),
    # Several launches; one launch with 16 warps; and one with 32 warps, with the most registers.
    *(Case("expert_order", "int32", rows=rows) for rows in (169_343, 2_708, 7_650)),
    *(Case("expert_order", "int32", rows=rows, **MANY) for rows in (169_343, 7_650)),
    Case("expert_order", "int32", num_experts=64, top_k=2),
    *(Case("expert_matmul", precision) for precision in ("bfloat16", "float16", "tf32", "float32")),
    Case("expert_matmul", "bfloat16", in_features=1433),
    Case("expert_matmul", "bfloat16", in_features=8415),
    Case("expert_matmul", "bfloat16", **MANY),
    # Wider than 256: tiles of their own on sm_90.
    Case("expert_matmul", "bfloat16", rows=34_493, in_features=512, out_features=512, num_experts=5),
    # Few enough rows that they are not ordered, and not listed for the weight's gradient.
    *(Case("expert_matmul", precision, rows=256) for precision in ("bfloat16", "float32")),
    # Not ordered, but listed; in plain float32 ordered too. Tiles of other heights.
    Case("expert_matmul", "bfloat16", rows=4096),
    *(Case("expert_matmul", precision, rows=2_704) for precision in ("bfloat16", "float32")),
    # In two passes, by two experts and by one, with rows of odd width: the most registers.
    Case("expert_matmul", "bfloat16", in_features=1433, num_experts=64),
    *(Case("routed_matmul", precision, rows=1) for precision in ("bfloat16", "float16", "tf32", "float32")),
    Case("routed_matmul", "float32", rows=64),
    Case("routed_matmul", "bfloat16", rows=1, in_features=1433),
    Case("routed_matmul", "float32", rows=1, in_features=8415),
    Case("routed_matmul", "bfloat16", rows=64, num_experts=128, top_k=8),
    Case("routed_matmul", "float32", rows=64, out_features=8192),
    *(Case("memory_update", precision) for precision in ("float32", "float16", "bfloat16", "float64")),
    Case("memory_update", "bfloat16", in_features=1433),
    Case("memory_update", "bfloat16", in_features=8415),
    Case("memory_update", "float32", in_features=8415),
    *(Case("memory_update", precision, **MANY) for precision in ("float32", "float16", "bfloat16", "float64")),
    *(Case("fold_experts", precision, rows=1) for precision in ("float32", "float16", "bfloat16")),
    Case("fold_experts", "bfloat16", rows=1, in_features=1433),
)


def at_hand(case: Case) -> Case:
    """The case as it is run here: in a rehearsal, small enough for Triton's interpreter to take a second."""
    if not REHEARSES:
        return case
    narrow = {"in_features": 16 + case.in_features % 2, "out_features": 16}
    return replace(case, rows=min(case.rows, 40), **narrow)


def multiplied_as(case: Case) -> str:
    """A case's precision as the tables of the grouped matmul name it."""
    return {"tf32": "tf32", "float32": "ieee"}.get(case.precision, "half")


@dataclass(frozen=True)
class Tensors:
    """The operators' arguments, named as in ``rbm_kernels.ops``: random values, or meta tensors."""

    x: Tensor
    grad: Tensor
    memory: Tensor
    weight: Tensor
    bias: Tensor
    gates: Tensor
    experts: Tensor
    cosines: Tensor

    @classmethod
    def of(cls, case: Case, device: str) -> "Tensors":
        """New random tensors for a case."""
        rows, width, out, num_experts = case.rows, case.in_features, case.out_features, case.num_experts
        wide = torch.float64 if case.precision == "float64" else torch.float32
        dtype = DTYPES[case.precision] if case.precision != "int32" else torch.float32
        routing = torch.rand(rows, num_experts, device=device, dtype=wide).topk(case.top_k)
        return cls(
            x=torch.randn(rows, width, device=device, dtype=dtype),
            grad=torch.randn(rows, out, device=device, dtype=dtype),
            memory=torch.randn(num_experts, width, device=device, dtype=wide),
            weight=torch.randn(num_experts, out, width, device=device, dtype=dtype) * width**-0.5,
            bias=torch.randn(num_experts, out, device=device, dtype=dtype),
            gates=routing.values.softmax(-1),
            experts=routing.indices.int(),
            cosines=routing.values,
        )


Launches = dict[str, Callable[[], object]]


def _cosine_topk(case: Case, t: Tensors) -> Launches:
    grad = torch.ones_like(t.gates)
    saved = (t.gates, t.experts, t.cosines)
    return {
        "gates, experts, cosines": lambda: cosine_topk_launch.cosine_topk(t.x, t.memory, case.top_k),
        "grad_h": lambda: cosine_topk_launch.backward(grad, grad, t.x, t.memory, *saved),
    }


def _expert_order(case: Case, t: Tensors) -> Launches:
    height = expert_matmul_config.tile_rows(case.rows)
    return {"order": lambda: expert_order_launch.expert_order(t.experts, case.num_experts, height)}


def _expert_matmul(case: Case, t: Tensors) -> Launches:
    # The order is an operator of its own: as in a training step, it exists before the multiplication.
    precision = multiplied_as(case)
    height = expert_matmul_config.tile_rows(case.rows, precision)
    small = expert_matmul_config.is_small(case.rows, case.top_k, case.num_experts, t.weight.numel(), precision)
    order = () if small else expert_order(t.experts, case.num_experts, height, _passes(case))
    layer = (t.x, t.weight, t.bias, t.gates, t.experts)
    launch = expert_matmul_launch
    return {
        "y": lambda: launch.expert_matmul(*layer, *order),
        "grad_x": lambda: launch.backward_input(t.grad, *layer, False, *order)[:1],
        "grad_x, grad_gates": lambda: launch.backward_input(t.grad, *layer, True, *order),
        "grad_weight, grad_bias": lambda: launch.backward_weight(t.grad, t.x, t.gates, t.experts, case.num_experts),
    }


def _routed_matmul(case: Case, t: Tensors) -> Launches:
    return {"y": lambda: routed_matmul_launch.routed_matmul(t.x, t.memory, t.weight, t.bias, case.top_k)}


def _memory_update(case: Case, t: Tensors) -> Launches:
    sums, total = torch.ones_like(t.memory), torch.ones_like(t.memory[:, 0])
    return {
        "weighted_sum, total": lambda: memory_update_launch.memory_statistics(
            t.x, t.gates, t.experts, case.num_experts
        ),
        "memory": lambda: memory_update_launch.memory_update_(t.memory, sums, total, 0.9),
    }


def _fold_experts(case: Case, t: Tensors) -> Launches:
    layer = (t.weight, t.bias, t.memory.to(t.weight.dtype), t.memory[:1, 0].to(t.weight.dtype))
    return {
        "weight, bias": lambda: fold_experts_launch.fold_experts(*layer),
        "grads": lambda: fold_experts_launch.backward(t.weight, t.bias, *layer),
    }


LAUNCHES: dict[str, Callable[[Case, Tensors], Launches]] = {
    "cosine_topk": _cosine_topk,
    "expert_order": _expert_order,
    "expert_matmul": _expert_matmul,
    "routed_matmul": _routed_matmul,
    "memory_update": _memory_update,
    "fold_experts": _fold_experts,
}


def claimed_programs(case: Case, kernel: str, architecture: int) -> int | None:
    """How many programs of a kernel share a multiprocessor according to its configuration; None if it has no claim."""
    if kernel.startswith("cosine_topk"):
        return cosine_topk_config.HELD
    if kernel == "memory_statistics_kernel":
        shape = (case.rows, case.in_features, case.num_experts, DTYPES[case.precision])
        return memory_update_config.configuration(*shape, Machine(architecture, 132)).programs
    precision = multiplied_as(case)
    choose = {
        "expert_matmul_fwd_kernel": expert_matmul_config.forward_tile,
        "expert_matmul_bwd_kernel": expert_matmul_config.backward_tile,
        "expert_matmul_bwd_weight_kernel": expert_matmul_config.weight_tile,
    }.get(kernel)
    in_passes = ("expert_matmul_fwd_kernel", "expert_matmul_bwd_kernel")
    passes = {"passes": _passes(case)} if kernel in in_passes else {}
    shape = (case.rows, case.in_features, case.out_features)
    return choose and choose(architecture, precision, *shape, **passes).programs


def _passes(case: Case) -> int:
    return expert_matmul_config.passes(case.rows, case.num_experts, case.top_k)


def launches(case: Case, tensors: Tensors) -> Launches:
    """The results that an operator computes for a case, and the launch of each."""
    return LAUNCHES[case.operator](case, tensors)


def labels(case: Case) -> list[str]:
    """The results that an operator computes for a case."""
    return list(launches(case, Tensors.of(case, "meta")))


def launch_meta(case: Case, label: str) -> None:
    """Launch on meta tensors, for compilation by ``rbm_kernels._ahead_of_time``."""
    with multiplying_as(case.precision):
        launches(case, Tensors.of(case, "meta"))[label]()
