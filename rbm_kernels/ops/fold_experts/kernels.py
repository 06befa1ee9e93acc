"""Attention and scale multiplied into the weights, and the gradients of all four parameters, in one launch each."""

import triton
import triton.language as tl


@triton.jit
def _scales(attention_ptr, log_scale_ptr, expert, columns, D, MAX_LOG_SCALE: tl.constexpr):
    """``exp(s)`` and ``exp(s) exp(a) [BLOCK_D]`` of an expert's columns in float32, with both logarithms."""
    log = tl.load(log_scale_ptr).to(tl.float32)
    # A NaN stays one, as in PyTorch's clamp.
    overall = tl.exp(tl.minimum(log, MAX_LOG_SCALE, propagate_nan=tl.PropagateNan.ALL))
    b_log = tl.zeros(columns.shape, tl.float32)
    b_scale = b_log + overall
    if attention_ptr is not None:
        b_log = tl.load(attention_ptr + expert * D + columns, mask=columns < D, other=0.0).to(tl.float32)
        b_scale *= tl.exp(tl.minimum(b_log, MAX_LOG_SCALE, propagate_nan=tl.PropagateNan.ALL))
    return overall, b_scale, log, b_log


@triton.jit
def fold_experts_fwd_kernel(
    weight_ptr,
    bias_ptr,
    attention_ptr,
    log_scale_ptr,
    folded_ptr,
    folded_bias_ptr,
    N,
    D,
    MAX_LOG_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Folded ``weight [E, N, D]`` and ``bias [E, N]``; a program for each tile of an expert."""
    tiles = tl.cdiv(D, BLOCK_D)
    column_tile = tl.program_id(0) % tiles
    row_tile = tl.program_id(0) // tiles % tl.cdiv(N, BLOCK_N)
    expert = (tl.program_id(0) // tiles // tl.cdiv(N, BLOCK_N)).to(tl.int64)
    columns = column_tile * BLOCK_D + tl.arange(0, BLOCK_D)
    rows = row_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    overall, b_scale, _, _ = _scales(attention_ptr, log_scale_ptr, expert, columns, D, MAX_LOG_SCALE)
    places = (expert * N + rows)[:, None] * D + columns[None, :]
    mask = (rows < N)[:, None] & (columns < D)[None, :]
    b_weight = tl.load(weight_ptr + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(folded_ptr + places, (b_weight * b_scale[None, :]).to(folded_ptr.dtype.element_ty), mask=mask)
    if bias_ptr is not None:
        # Once for all tiles of columns.
        m_rows = rows < tl.where(column_tile == 0, N, 0)
        b_bias = tl.load(bias_ptr + expert * N + rows, mask=m_rows, other=0.0).to(tl.float32)
        folded_bias = (b_bias * overall).to(folded_bias_ptr.dtype.element_ty)
        tl.store(folded_bias_ptr + expert * N + rows, folded_bias, mask=m_rows)


@triton.jit
def fold_experts_bwd_kernel(
    grad_ptr,
    grad_folded_bias_ptr,
    weight_ptr,
    bias_ptr,
    attention_ptr,
    log_scale_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    grad_attention_ptr,
    grad_scale_ptr,
    N,
    D,
    MAX_LOG_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradients of the parameters from those of folded weight and bias; a program for each expert and tile of columns.

    A program goes through all rows of its columns, so that each sum over rows has one order. ``grad_scale`` gets one
    part per program.
    """
    tiles = tl.cdiv(D, BLOCK_D)
    column_tile = tl.program_id(0) % tiles
    expert = (tl.program_id(0) // tiles).to(tl.int64)
    columns = column_tile * BLOCK_D + tl.arange(0, BLOCK_D)
    overall, b_scale, log, b_log = _scales(attention_ptr, log_scale_ptr, expert, columns, D, MAX_LOG_SCALE)
    b_sum = tl.zeros((BLOCK_D,), tl.float32)
    b_bias_sum = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)
        places = (expert * N + rows)[:, None] * D + columns[None, :]
        mask = (rows < N)[:, None] & (columns < D)[None, :]
        b_grad = tl.load(grad_ptr + places, mask=mask, other=0.0).to(tl.float32)
        b_weight = tl.load(weight_ptr + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_weight_ptr + places, (b_grad * b_scale[None, :]).to(grad_weight_ptr.dtype.element_ty), mask=mask)
        b_sum += tl.sum(b_grad * b_weight, 0)
        if bias_ptr is not None:
            m_rows = rows < tl.where(column_tile == 0, N, 0)
            b_grad_bias = tl.load(grad_folded_bias_ptr + expert * N + rows, mask=m_rows, other=0.0).to(tl.float32)
            b_bias = tl.load(bias_ptr + expert * N + rows, mask=m_rows, other=0.0).to(tl.float32)
            grad_bias = (b_grad_bias * overall).to(grad_bias_ptr.dtype.element_ty)
            tl.store(grad_bias_ptr + expert * N + rows, grad_bias, mask=m_rows)
            b_bias_sum += b_grad_bias * b_bias
    b_product = tl.where(columns < D, b_sum * b_scale, 0.0)
    if attention_ptr is not None:
        # No gradient passes where the logarithm is clamped, nor where it is NaN.
        b_grad = tl.where(b_log <= MAX_LOG_SCALE, b_product, 0.0).to(grad_attention_ptr.dtype.element_ty)
        tl.store(grad_attention_ptr + expert * D + columns, b_grad, mask=columns < D)
    part = tl.sum(b_product, 0) + overall * tl.sum(b_bias_sum, 0)
    tl.store(grad_scale_ptr + tl.program_id(0), tl.where(log <= MAX_LOG_SCALE, part, 0.0))
