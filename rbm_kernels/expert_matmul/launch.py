"""Launching the kernels: outputs, grids and configurations, all known from shapes. Nothing waits for the device.

The functions have the signatures of the operators and take tensors of any device: Triton's interpreter runs them on CPU
tensors. ``x`` and ``grad`` may have any row stride; whatever else is not contiguous is copied.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from rbm_kernels.expert_matmul import config, kernels, weight_kernels
from rbm_kernels.expert_order import expert_order, pass_columns

# Work of one program of the reduction: enough for 16-byte accesses of 4 warps.
_REDUCE_BLOCK = 1024
# Consecutive rows that one program of the counting sort looks at.
_LIST_BLOCK = 1024


class _Routing(NamedTuple):
    """Where the rows go: gates and experts by row, and for each pass rows by tile and experts by tile."""

    gates: Tensor
    experts: Tensor
    order: Tensor
    tile_experts: Tensor
    tile_counts: Tensor
    block_m: int

    def passes(self, result: Tensor) -> Iterator["_Pass"]:
        """What kernels take, pass by pass; float32 sums go from one to the next, in the result where it is float32."""
        last = self.order.shape[0] - 1
        sums = result
        if last > 0 and result.dtype != torch.float32:
            sums = torch.empty(result.shape, dtype=torch.float32, device=result.device)
        for number, columns in enumerate(pass_columns(self.gates.shape[1], last + 1)):
            order = (self.order[number], self.tile_experts[number], self.tile_counts[number])
            routing = (self.gates[:, columns], self.experts[:, columns], *order)
            yield _Pass(routing, columns, sums if number > 0 else None, result if number == last else sums)


class _Pass(NamedTuple):
    """One pass: its routing, its columns of the experts, the sums before it and after it."""

    routing: tuple[Tensor, ...]
    columns: slice
    before: Tensor | None
    after: Tensor


def expert_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor,
    experts: Tensor,
    order: Tensor | None = None,
    tile_experts: Tensor | None = None,
    tile_counts: Tensor | None = None,
    block_m: int = 0,
) -> Tensor:
    """``y [B, N]``."""
    routing = _routing(gates, experts, weight.shape[0], order, tile_experts, tile_counts, block_m)
    return _multiply(x, weight.contiguous(), bias, routing, transposed=False)


def backward_input(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor,
    experts: Tensor,
    with_gates: bool = True,
    order: Tensor | None = None,
    tile_experts: Tensor | None = None,
    tile_counts: Tensor | None = None,
    block_m: int = 0,
) -> tuple[Tensor, Tensor]:
    """``grad_x [B, D]`` and ``grad_gates [B, k]``; without gates the latter is empty and one accumulator serves."""
    routing = _routing(gates, experts, weight.shape[0], order, tile_experts, tile_counts, block_m)
    grad, weight = _with_unit_columns(grad), weight.contiguous()
    if not with_gates:
        return _multiply(grad, weight, None, routing, transposed=True), gates.new_empty(0)
    x, bias = _with_unit_columns(x), bias if bias is None else bias.contiguous()
    (rows, in_features), (num_experts, out_features) = x.shape, weight.shape[:2]
    grad_x = torch.empty((rows, in_features), dtype=x.dtype, device=x.device)
    grad_gates = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
    if rows == 0:
        return grad_x, grad_gates
    architecture, precision = machine(x)
    tile = config.backward_tile(architecture, precision, rows, in_features, out_features)
    grid = (_parts(routing, rows, tile.block_m),)
    for routed, columns, before, after in routing.passes(grad_x):
        kernels.expert_matmul_bwd_kernel[grid](
            grad,
            x,
            weight,
            bias,
            *routed,
            before,
            after,
            grad_gates[:, columns],
            rows,
            routing.block_m,
            in_features,
            out_features,
            num_experts,
            grad.stride(0),
            x.stride(0),
            **_constants(routing, columns, bias is not None, tile, precision),
        )
    return grad_x, grad_gates


def backward_weight(
    grad: Tensor, x: Tensor, gates: Tensor, experts: Tensor, num_experts: int, with_bias: bool = True
) -> tuple[Tensor, Tensor]:
    """``grad_weight [E, N, D]`` and ``grad_bias [E, N]``; without a bias the latter is empty."""
    grad, x = _with_unit_columns(grad), _with_unit_columns(x)
    (rows, in_features), out_features = x.shape, grad.shape[1]
    grad_weight = torch.empty((num_experts, out_features, in_features), dtype=x.dtype, device=x.device)
    grad_bias = torch.empty((num_experts, out_features) if with_bias else 0, dtype=x.dtype, device=x.device)
    if rows == 0:
        return grad_weight.zero_(), grad_bias.zero_()
    listed_rows, listed_gates, ends = _rows_by_expert(gates.contiguous(), experts.contiguous(), num_experts)

    architecture, precision = machine(x)
    tile = config.weight_tile(architecture, precision, rows, in_features, out_features)
    weight_tiles = triton.cdiv(out_features, tile.block_m) * triton.cdiv(in_features, tile.block_n)
    share_rows = config.share_rows(architecture, tile, weight_tiles, rows * experts.shape[1], num_experts)
    shares = triton.cdiv(rows * experts.shape[1], share_rows) + num_experts
    partial = torch.empty((shares, (in_features + 1) * out_features), dtype=torch.float32, device=x.device)
    shape = {"HAS_BIAS": with_bias, "BLOCK_E": triton.next_power_of_2(num_experts)}
    weight_kernels.expert_matmul_bwd_weight_kernel[(shares * weight_tiles,)](
        grad,
        x,
        listed_rows,
        listed_gates,
        ends,
        partial,
        ends.shape[1],
        share_rows,
        in_features,
        out_features,
        num_experts,
        grad.stride(0),
        x.stride(0),
        **shape,
        **_tile_constants(tile, precision),
    )
    weight_kernels.expert_matmul_bwd_reduce_kernel[(triton.cdiv(partial.shape[1], _REDUCE_BLOCK), num_experts)](
        partial,
        ends,
        grad_weight,
        grad_bias,
        ends.shape[1],
        share_rows,
        num_experts,
        in_features * out_features,
        out_features,
        BLOCK=_REDUCE_BLOCK,
        **shape,
    )
    return grad_weight, grad_bias


def _rows_by_expert(gates: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows by expert and their gates, ``[B * k]``, and where each expert's rows of each block of rows end."""
    rows, top_k = experts.shape
    blocks = triton.cdiv(rows, _LIST_BLOCK)
    counts = torch.empty((num_experts, blocks), dtype=torch.int32, device=experts.device)
    listed_rows = torch.empty(rows * top_k, dtype=torch.int32, device=experts.device)
    listed_gates = torch.empty(rows * top_k, dtype=gates.dtype, device=experts.device)
    shape = {"TOP_K": top_k, "BLOCK_TOP_K": triton.next_power_of_2(top_k), "BLOCK_ROWS": _LIST_BLOCK}
    weight_kernels.expert_matmul_bwd_count_kernel[(blocks, num_experts)](experts, counts, rows, blocks, **shape)
    ends = counts.flatten().cumsum(0, dtype=torch.int32).view_as(counts)
    weight_kernels.expert_matmul_bwd_list_kernel[(blocks, num_experts)](
        gates, experts, ends, listed_rows, listed_gates, rows, blocks, **shape
    )
    return listed_rows, listed_gates, ends


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, routing: _Routing, *, transposed: bool) -> Tensor:
    """``y = sum_e gate_e (x W_e^T + bias_e)``, or with ``transposed`` ``sum_e gate_e x W_e``; weight is contiguous."""
    x, bias = _with_unit_columns(x), bias if bias is None else bias.contiguous()
    rows, num_experts = x.shape[0], weight.shape[0]
    out_features, in_features = weight.shape[1:] if not transposed else weight.shape[:0:-1]
    strides = (1, out_features) if transposed else (in_features, 1)
    y = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    architecture, precision = machine(x)
    tile = config.forward_tile(architecture, precision, rows, in_features, out_features, routing.order.shape[0])
    grid = (_parts(routing, rows, tile.block_m) * triton.cdiv(out_features, tile.block_n),)
    for routed, columns, before, after in routing.passes(y):
        kernels.expert_matmul_fwd_kernel[grid](
            x,
            weight,
            bias,
            *routed,
            before,
            after,
            rows,
            routing.block_m,
            in_features,
            out_features,
            num_experts,
            x.stride(0),
            *strides,
            **_constants(routing, columns, bias is not None, tile, precision),
        )
    return y


def _routing(gates, experts, num_experts, order, tile_experts, tile_counts, block_m) -> _Routing:
    rows, top_k = experts.shape
    if order is None:
        passes = config.passes(rows, num_experts, top_k)
        order, tile_experts, tile_counts, block_m = expert_order(experts, num_experts, config.tile_rows(rows), passes)
    if order.dim() == 1:
        order, tile_experts, tile_counts = order[None], tile_experts[None], tile_counts[None]
    return _Routing(gates.contiguous(), experts.contiguous(), order, tile_experts, tile_counts, block_m)


def _parts(routing: _Routing, rows: int, height: int) -> int:
    """Programs over the rows: every tile in parts of ``height`` rows, the last tile too."""
    return triton.cdiv(rows, routing.block_m) * triton.cdiv(routing.block_m, height)


def _with_unit_columns(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


def machine(x: Tensor) -> tuple[int, str]:
    """Architecture and precision. The interpreter, on CPU tensors, takes sm_90's configurations."""
    major, minor = torch.cuda.get_device_capability(x.device) if x.device.type != "cpu" else (9, 0)
    if x.dtype != torch.float32:
        return 10 * major + minor, "half"
    # PyTorch's own setting, whichever of its three interfaces the user set it through.
    return 10 * major + minor, "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _constants(routing: _Routing, columns: slice, has_bias: bool, tile: config.Tile, precision: str) -> dict:
    """What the kernels over ordered rows are compiled for."""
    top_k = columns.stop - columns.start
    return {
        "HAS_BIAS": has_bias,
        "BLOCK_UNION": config.UNION_BLOCK,
        "STRIDE_ROUTING": routing.experts.shape[1],
        "TOP_K": top_k,
        "BLOCK_TOP_K": triton.next_power_of_2(top_k),
        **_tile_constants(tile, precision),
    }


def _tile_constants(tile: config.Tile, precision: str) -> dict:
    return {
        "INPUT_PRECISION": "tf32" if precision == "tf32" else "ieee",
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
