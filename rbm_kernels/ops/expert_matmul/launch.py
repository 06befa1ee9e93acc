"""Launch functions of the kernels: outputs, grids and configurations, all derived from shapes, without synchronisation.

The functions have the signatures of the operators and take tensors on any device: Triton's interpreter runs them on CPU
tensors. ``x`` and ``grad`` may have any row stride; other non-contiguous arguments are copied. The ``_prepare_...``
functions compute what depends only on shapes, once per shape.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from rbm_kernels._launching import contiguous, launcher, prepared, with_adjacent_features
from rbm_kernels.checks import MOST_SIZE, check_tiles
from rbm_kernels.ops.expert_matmul import config, kernels, weight_kernels
from rbm_kernels.ops.expert_matmul.precision import architecture_and_precision, reads_by_column, tile_constants
from rbm_kernels.ops.expert_order import expert_order, pass_columns
from rbm_kernels.ops.expert_order.launch import height

# Elements per program of the reduction: enough for 16-byte accesses of 4 warps.
_REDUCE_BLOCK = 1024
# Consecutive rows that one program of the counting sort reads.
_LIST_BLOCK = 1024
# Options of its counting programs: six per multiprocessor. By default ptxas fits nine for k = 8 by spilling 16 bytes.
_COUNTING = {"num_warps": 4, "programs": 6}

Launch = Callable[..., None]


class _Routing(NamedTuple):
    """The routing: gates and experts by row, order and experts by tile, the latter with or without a pass dimension.

    For few rows there is no order: the rows keep their own.
    """

    gates: Tensor
    experts: Tensor
    order: Tensor | None
    tile_experts: Tensor | None
    tile_counts: Tensor | None
    block_m: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts per row, passes, height of a tile: what the launches depend on."""
        passes = 1 if self.order is None or self.order.dim() == 1 else self.order.shape[0]
        return self.experts.shape[1], passes, self.block_m

    def passes(self, result: Tensor) -> Iterator["_Pass"]:
        """Arguments of the kernels for each pass. Passes hand on float32 sums, in ``result`` if it is float32."""
        if self.order is None or self.order.dim() == 1:
            yield _Pass(self[:5], slice(None), None, result)
            return
        last = self.order.shape[0] - 1
        sums = result
        if last > 0 and result.dtype != torch.float32:
            sums = torch.empty(result.shape, dtype=torch.float32, device=result.device)
        for number, columns in enumerate(pass_columns(self.gates.shape[1], last + 1)):
            order = (self.order[number], self.tile_experts[number], self.tile_counts[number])
            routing = (self.gates[:, columns], self.experts[:, columns], *order)
            yield _Pass(routing, columns, sums if number > 0 else None, result if number == last else sums)


class _Pass(NamedTuple):
    """One pass: its routing, its columns of the experts, the sums before and after it."""

    routing: tuple[Tensor | None, ...]
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
    how = architecture_and_precision(x)
    routing = _routing(how[1], weight, gates, experts, order, tile_experts, tile_counts, block_m)
    return _multiply(x, weight.contiguous(), bias, routing, how, transposed=False)


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
    """``grad_x [B, D]`` and ``grad_gates [B, k]``. Without gates the latter is empty and one accumulator suffices."""
    how = architecture_and_precision(x)
    routing = _routing(how[1], weight, gates, experts, order, tile_experts, tile_counts, block_m)
    grad, weight = with_adjacent_features(grad), weight.contiguous()
    by_column = reads_by_column(*how, x.shape[0])
    if by_column:
        weight = weight.transpose(1, 2).contiguous()
    if not with_gates:
        return _multiply(grad, weight, None, routing, how, transposed=not by_column), gates.new_empty(0)
    x, bias = with_adjacent_features(x), contiguous(bias)
    (rows, in_features), out_features, num_experts = x.shape, grad.shape[1], weight.shape[0]
    grad_x = torch.empty((rows, in_features), dtype=x.dtype, device=x.device)
    grad_gates = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
    if rows == 0:
        return grad_x, grad_gates
    weight = _pad(weight, rows)
    sizes = (rows, in_features, out_features, weight.shape[-1], by_column)
    launches = _prepare_backward(*how, *sizes, bias is not None, *routing.shape)
    for launch, (routed, columns, before, after) in zip(launches, routing.passes(grad_x), strict=True):
        launch(
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
            num_experts,
            grad.stride(0),
            x.stride(0),
        )
    return grad_x, grad_gates


@prepared
def _prepare_backward(
    architecture: int,
    precision: str,
    rows: int,
    in_features: int,
    out_features: int,
    weight_last: int,
    by_column: bool,
    has_bias: bool,
    top_k: int,
    passes: int,
    block_m: int,
) -> list[Launch]:
    tile = config.backward_tile(architecture, precision, rows, in_features, out_features, passes)
    grid = (_parts(block_m, rows, tile.block_m),)
    of_shape = {"IN_FEATURES": in_features, "OUT_FEATURES": out_features, "WEIGHT_LAST": weight_last}
    of_shape["BY_COLUMN"] = by_column
    constants = [
        {**those, "BLOCK_TOP_K": triton.next_power_of_2(those["TOP_K"]), "BLOCK_UNION": config.UNION_BLOCK}
        for those in _constants(top_k, passes, has_bias, tile, architecture, precision)
    ]
    return [launcher(kernels.expert_matmul_bwd_kernel, grid, **of_shape, **those) for those in constants]


def backward_weight(
    grad: Tensor, x: Tensor, gates: Tensor, experts: Tensor, num_experts: int, with_bias: bool = True
) -> tuple[Tensor, Tensor]:
    """``grad_weight [E, N, D]`` and ``grad_bias [E, N]``. Without a bias the latter is empty."""
    grad, x = with_adjacent_features(grad), with_adjacent_features(x)
    (rows, in_features), out_features = x.shape, grad.shape[1]
    grad_weight = torch.empty((num_experts, out_features, in_features), dtype=x.dtype, device=x.device)
    grad_bias = torch.empty((num_experts, out_features) if with_bias else 0, dtype=x.dtype, device=x.device)
    if rows == 0:
        return grad_weight.zero_(), grad_bias.zero_()
    gates, experts = gates.contiguous(), experts.contiguous()
    shape = (*architecture_and_precision(x), rows, in_features, out_features, experts.shape[1], num_experts, with_bias)
    strides = (grad.stride(0), x.stride(0))
    if config.sums_all_rows(rows, experts.shape[1], num_experts, grad_weight.numel()):
        _prepare_small_weight(*shape)(grad, x, gates, experts, grad_weight, grad_bias, rows, *strides)
        return grad_weight, grad_bias
    launches = _prepare_weight(*shape, *strides)
    device, pairs = x.device, experts.numel()
    # Rows by expert and their gates, and the ends of each expert's rows within each block of rows.
    counts = torch.empty(num_experts * launches.blocks, dtype=torch.int32, device=device)
    listed_rows = torch.empty(pairs, dtype=torch.int32, device=device)
    listed_gates = torch.empty(pairs, dtype=gates.dtype, device=device)
    launches.count(experts, counts, rows, launches.blocks)
    ends = counts.cumsum(0, dtype=torch.int32)
    launches.list_rows(gates, experts, ends, listed_rows, listed_gates, rows, launches.blocks)
    # Each share's sums of grad_weight, followed by its sums of grad_bias.
    partial = torch.empty((launches.shares, (in_features + 1) * out_features), dtype=torch.float32, device=device)
    launches.multiply(
        grad,
        x,
        listed_rows,
        listed_gates,
        ends,
        partial,
        launches.blocks,
        launches.share_rows,
        num_experts,
    )
    launches.reduce(
        partial,
        ends,
        grad_weight,
        grad_bias,
        launches.blocks,
        launches.share_rows,
        num_experts,
        in_features * out_features,
        out_features,
    )
    return grad_weight, grad_bias


@prepared
def _prepare_small_weight(
    architecture: int,
    precision: str,
    rows: int,
    in_features: int,
    out_features: int,
    top_k: int,
    num_experts: int,
    with_bias: bool,
) -> Launch:
    tile = config.small_weight_tile(precision, rows, in_features, out_features)
    tiles = triton.cdiv(out_features, tile.block_m) * triton.cdiv(in_features, tile.block_n)
    return launcher(
        weight_kernels.expert_matmul_bwd_weight_small_kernel,
        (tiles, num_experts),
        IN_FEATURES=in_features,
        OUT_FEATURES=out_features,
        TOP_K=top_k,
        HAS_BIAS=with_bias,
        SUM_BY_SLICES=precision == "ieee",
        **tile_constants(tile, architecture, precision, by_rows=True),
    )


class _WeightLaunches(NamedTuple):
    """The four launches of the weight's gradient, and how they partition the rows."""

    blocks: int
    shares: int
    share_rows: int
    count: Launch
    list_rows: Launch
    multiply: Launch
    reduce: Launch


@prepared
def _prepare_weight(
    architecture: int,
    precision: str,
    rows: int,
    in_features: int,
    out_features: int,
    top_k: int,
    num_experts: int,
    with_bias: bool,
    stride_grad: int,
    stride_x: int,
) -> _WeightLaunches:
    # Choices, and counts per expert and block of rows, are numbered in int32.
    if max(rows * top_k, num_experts * triton.cdiv(rows, _LIST_BLOCK)) > MOST_SIZE:
        raise ValueError(
            f"rbm::expert_matmul: experts has shape [{rows}, {top_k}], expected below 2^31 choices for the gradient of"
            f" weight, and below 2^41 / {num_experts} rows for as many experts: split the batch"
        )
    tile = config.weight_tile(architecture, precision, rows, in_features, out_features)
    weight_tiles = triton.cdiv(out_features, tile.block_m) * triton.cdiv(in_features, tile.block_n)
    share_rows = config.share_rows(architecture, precision, tile, weight_tiles, rows * top_k, num_experts)
    shares = triton.cdiv(rows * top_k, share_rows) + num_experts
    blocks = triton.cdiv(rows, _LIST_BLOCK)
    of_list = {"TOP_K": top_k, "BLOCK_TOP_K": triton.next_power_of_2(top_k), "BLOCK_ROWS": _LIST_BLOCK}
    of_sums = {"HAS_BIAS": with_bias, "BLOCK_E": triton.next_power_of_2(num_experts)}
    list_grid = (blocks, num_experts)
    reduce_grid = (triton.cdiv((in_features + 1) * out_features, _REDUCE_BLOCK), num_experts)
    return _WeightLaunches(
        blocks=blocks,
        shares=shares,
        share_rows=share_rows,
        count=launcher(weight_kernels.expert_matmul_bwd_count_kernel, list_grid, **of_list, **_COUNTING),
        list_rows=launcher(weight_kernels.expert_matmul_bwd_list_kernel, list_grid, **of_list),
        multiply=launcher(
            weight_kernels.expert_matmul_bwd_weight_kernel,
            (shares * weight_tiles,),
            **of_sums,
            IN_FEATURES=in_features,
            OUT_FEATURES=out_features,
            STRIDE_GRAD=stride_grad,
            STRIDE_X=stride_x,
            SUM_BY_SLICES=precision == "ieee",
            **tile_constants(tile, architecture, precision, by_rows=True),
        ),
        reduce=launcher(weight_kernels.expert_matmul_bwd_reduce_kernel, reduce_grid, BLOCK=_REDUCE_BLOCK, **of_sums),
    )


def _multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: _Routing, how: tuple[int, str], *, transposed: bool
) -> Tensor:
    """``y = sum_e gate_e (x W_e^T + bias_e)``, or with ``transposed`` ``sum_e gate_e x W_e``; weight is contiguous.

    ``how`` is the result of :func:`architecture_and_precision`.
    """
    x, bias = with_adjacent_features(x), contiguous(bias)
    rows, num_experts = x.shape[0], weight.shape[0]
    out_features, in_features = weight.shape[1:] if not transposed else weight.shape[:0:-1]
    y = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    weight = _pad(weight, rows)
    sizes = (rows, in_features, out_features, weight.shape[-1])
    launches = _prepare_multiply(*how, *sizes, transposed, bias is not None, *routing.shape)
    for launch, (routed, _, before, after) in zip(launches, routing.passes(y), strict=True):
        launch(x, weight, bias, *routed, before, after, rows, routing.block_m, num_experts, x.stride(0))
    return y


@prepared
def _prepare_multiply(
    architecture: int,
    precision: str,
    rows: int,
    in_features: int,
    out_features: int,
    weight_last: int,
    transposed: bool,
    has_bias: bool,
    top_k: int,
    passes: int,
    block_m: int,
) -> list[Launch]:
    tile = config.forward_tile(architecture, precision, rows, in_features, out_features, passes)
    grid = (_parts(block_m, rows, tile.block_m) * triton.cdiv(out_features, tile.block_n),)
    of_shape = {"IN_FEATURES": in_features, "OUT_FEATURES": out_features, "WEIGHT_LAST": weight_last}
    of_shape["TRANSPOSED"] = transposed
    constants = _constants(top_k, passes, has_bias, tile, architecture, precision)
    return [launcher(kernels.expert_matmul_fwd_kernel, grid, **of_shape, **those) for those in constants]


def _routing(precision, weight, gates, experts, order, tile_experts, tile_counts, block_m) -> _Routing:
    (rows, k), num_experts = experts.shape, weight.shape[0]
    if order is None and config.is_small(rows, k, num_experts, weight.numel(), precision):
        block_m = config.tile_rows(rows, precision)
    elif order is None:
        block_m, passes = config.order_of(rows, num_experts, k, precision)
        check_tiles("expert_matmul", rows, block_m, num_experts)
        order, tile_experts, tile_counts, _ = expert_order(experts, num_experts, block_m, passes)
    block_m = height(rows, block_m)
    return _Routing(gates.contiguous(), experts.contiguous(), order, tile_experts, tile_counts, block_m)


def _parts(block_m: int, rows: int, height: int) -> int:
    """Number of programs over the rows: each tile of ``block_m``, also the last, in parts of ``height`` rows."""
    return triton.cdiv(rows, block_m) * triton.cdiv(block_m, height)


def _pad(weight: Tensor, rows: int) -> Tensor:
    """Pad D of ``weight [E, N, D]`` with zeros to a multiple of 8, in half precision and for many rows.

    Asynchronous copies of 16 bytes need rows that start at multiples of 16 bytes. Every tile of rows reads its experts'
    weights again, which repays the copy thousands of times; for few rows it does not repay its launches.
    """
    features = weight.shape[-1]
    if weight.element_size() != 2 or features % 8 == 0 or rows < config.MANY_ROWS:
        return weight
    padded = weight.new_zeros((*weight.shape[:-1], -(-features // 8) * 8))
    padded[..., :features] = weight
    return padded


def _constants(
    top_k: int, passes: int, has_bias: bool, tile: config.Tile, architecture: int, precision: str
) -> Iterator[dict]:
    """Compile-time constants of the kernels over ordered rows, for each pass."""
    for columns in pass_columns(top_k, passes):
        experts = columns.stop - columns.start
        of_pass = {"HAS_BIAS": has_bias, "STRIDE_ROUTING": top_k, "TOP_K": experts}
        yield {**of_pass, **tile_constants(tile, architecture, precision)}
