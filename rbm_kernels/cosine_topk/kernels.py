"""Routing on the GPU: one Triton kernel forward, one backward.

Dot products run on the tensor cores and are float32 all the same: a float32 number is the sum of three bfloat16
numbers, and the product of two of those is exact. TensorFloat-32 would keep 11 of the 24 bits, few enough to send a row
to the wrong expert; without tensor cores the sums over a row would take longer than reading it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rbm_kernels.cosine_topk.config import configuration, machine_of
from rbm_kernels.cosine_topk.reference import EPS


@triton.jit
def _upper_half(b_x):
    """The bfloat16 that is ``b_x`` (float32) without its lower 16 bits: a cut, which is cheaper than rounding."""
    return (b_x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _split(b_x):
    """Three bfloat16 tensors whose sum is ``b_x`` exactly: 8 of the 24 bits each, save where the third underflows."""
    b_x = b_x.to(tl.float32)
    b_high = _upper_half(b_x)
    b_rest = b_x - b_high.to(tl.float32)
    b_middle = _upper_half(b_rest)
    b_low = _upper_half(b_rest - b_middle.to(tl.float32))
    return b_high, b_middle, b_low


@triton.jit
def _side_by_side(b_columns):
    """The parts of ``b_columns [K, N]`` in one matrix ``[K, 4 N]``, the fourth zero: one product serves them all."""
    b_high, b_middle, b_low = _split(b_columns)
    b_parts = tl.join(tl.join(b_high, b_middle), tl.join(b_low, tl.zeros_like(b_low)))
    return tl.reshape(tl.permute(b_parts, (0, 2, 3, 1)), (b_columns.shape[0], 4 * b_columns.shape[1]))


@triton.jit
def _below_each_other(b_columns):
    """The parts of ``b_columns [N, K]`` in one matrix ``[4 K, N]``, the fourth part zero."""
    b_high, b_middle, b_low = _split(b_columns)
    b_parts = tl.join(tl.join(b_high, b_middle), tl.join(b_low, tl.zeros_like(b_low)))
    return tl.reshape(tl.permute(b_parts, (2, 3, 1, 0)), (4 * b_columns.shape[1], b_columns.shape[0]))


@triton.jit
def _dot_float32(b_rows, b_parts, N: tl.constexpr):
    """``b_rows [M, K] @ b_columns [K, N]`` to float32 accuracy, where ``b_parts = _side_by_side(b_columns)``."""
    if b_rows.dtype == tl.bfloat16:
        b_dot = tl.dot(b_rows, b_parts)
    else:
        # The smallest products come first, so that fewer of their bits are lost.
        b_high, b_middle, b_low = _split(b_rows)
        if b_rows.dtype == tl.float32:
            b_dot = tl.dot(b_low, b_parts)
            b_dot = tl.dot(b_middle, b_parts, b_dot)
        else:  # two parts hold a float16
            b_dot = tl.dot(b_middle, b_parts)
        b_dot = tl.dot(b_high, b_parts, b_dot)
    return tl.sum(tl.reshape(b_dot, (b_rows.shape[0], 4, N)), 1)


@triton.jit
def _square_norm(b_rows):
    """Sum of squares of each row of ``b_rows [M, K]``, in float32."""
    if b_rows.dtype == tl.float32:
        b_sum = tl.sum(b_rows * b_rows, 1)
    else:
        # Half-precision products are exact, and the diagonal of the rows' product with themselves comes free on tensor
        # cores, where converting, squaring and shuffling every element costs more than reading it.
        places = tl.arange(0, b_rows.shape[0])
        b_product = tl.dot(b_rows, tl.trans(b_rows))
        b_sum = tl.sum(tl.where(places[:, None] == places[None, :], b_product, 0.0), 1)
    return b_sum


@triton.jit
def _load_rows(h_ptr, h_stride, rows, m_rows, start, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Columns ``start`` to ``start + BLOCK_D`` of the rows ``[BLOCK_M]`` from ``h_ptr`` on: ``[BLOCK_M, BLOCK_D]``."""
    columns = start + tl.arange(0, BLOCK_D)
    mask = m_rows[:, None] & (columns < D)[None, :]
    return tl.load(h_ptr + (rows[:, None] * h_stride + columns[None, :]), mask=mask, other=0.0)


@triton.jit
def _load_memory(
    memory_ptr, stride, start, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Columns ``start`` to ``start + BLOCK_D`` of the memory, transposed: ``[BLOCK_D, BLOCK_E]``."""
    experts = tl.arange(0, BLOCK_E)
    columns = start + tl.arange(0, BLOCK_D)
    mask = (experts < E)[None, :] & (columns < D)[:, None]
    return tl.load(memory_ptr + experts[None, :] * stride + columns[:, None], mask=mask, other=0.0)


@triton.jit
def cosine_topk_fwd_kernel(
    h_ptr,
    memory_ptr,
    gates_ptr,
    experts_ptr,
    cosines_ptr,
    B,
    h_stride,
    memory_stride,
    temperature,
    D: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Route rows: ``h [B, D]``, ``memory [E, D]`` float32 -> ``gates``, ``experts``, ``cosines``, each ``[B, K]``."""
    experts = tl.arange(0, BLOCK_E)
    sharpness = 1.0 / temperature
    if D <= BLOCK_D:
        # The memory stays on the chip while one tile of rows after the other passes it.
        b_memory = _load_memory(memory_ptr, memory_stride, 0, D, E, BLOCK_D, BLOCK_E)
        b_memory_square = tl.sum(b_memory * b_memory, 0)
        b_parts = _side_by_side(b_memory)
    for tile in tl.range(tl.program_id(0), tl.cdiv(B, BLOCK_M), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * BLOCK_M
        rows = tl.arange(0, BLOCK_M)
        m_rows = rows < B - tile * BLOCK_M
        if D <= BLOCK_D:
            b_h = _load_rows(h_ptr + first * h_stride, h_stride, rows, m_rows, 0, D, BLOCK_D)
            b_square = _square_norm(b_h)
            b_dot = _dot_float32(b_h, b_parts, BLOCK_E)
        else:
            b_dot = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
            b_square = tl.zeros((BLOCK_M,), tl.float32)
            b_memory_square = tl.zeros((BLOCK_E,), tl.float32)
            for start in tl.range(0, D, BLOCK_D):
                b_h = _load_rows(h_ptr + first * h_stride, h_stride, rows, m_rows, start, D, BLOCK_D)
                b_memory = _load_memory(memory_ptr, memory_stride, start, D, E, BLOCK_D, BLOCK_E)
                b_square += _square_norm(b_h)
                b_memory_square += tl.sum(b_memory * b_memory, 0)
                # Tensor cores cut where they should round, and a long sum would drift: tiles are added outside of them.
                b_dot += _dot_float32(b_h, _side_by_side(b_memory), BLOCK_E)
        # 1 / max(|v|, EPS)
        b_scale = tl.rsqrt(tl.maximum(b_square, EPS * EPS))
        b_memory_scale = tl.rsqrt(tl.maximum(b_memory_square, EPS * EPS))
        b_cosines = b_dot * b_scale[:, None] * b_memory_scale[None, :]

        # As in torch.sort, NaN ranks above every cosine, so that a bad row still names K different experts.
        b_key = tl.where(b_cosines == b_cosines, b_cosines, 2.0)
        b_key = tl.where((experts < E)[None, :], b_key, float("-inf"))
        choices = tl.arange(0, BLOCK_K)
        b_top = tl.full((BLOCK_M, BLOCK_K), float("-inf"), tl.float32)
        b_chosen = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
        for j in tl.static_range(K):
            b_best, b_expert = tl.max(b_key, 1, return_indices=True, return_indices_tie_break_left=True)
            b_key = tl.where(experts[None, :] == b_expert[:, None], float("-inf"), b_key)
            b_top = tl.where(choices[None, :] == j, b_best[:, None], b_top)
            b_chosen = tl.where(choices[None, :] == j, b_expert[:, None], b_chosen)
        b_top = tl.where(b_top < 2.0, b_top, float("nan"))

        # exp(-inf) = 0 for the columns from K on.
        b_weight = tl.exp((b_top - tl.max(b_top, 1)[:, None]) * sharpness)
        b_gates = b_weight / tl.sum(b_weight, 1)[:, None]
        places = first * K + (rows[:, None] * K + choices[None, :])
        m_places = m_rows[:, None] & (choices < K)[None, :]
        tl.store(gates_ptr + places, b_gates, mask=m_places)
        tl.store(experts_ptr + places, b_chosen, mask=m_places)
        tl.store(cosines_ptr + places, b_top, mask=m_places)


@triton.jit
def cosine_topk_bwd_kernel(
    grad_gates_ptr,
    grad_cosines_ptr,
    h_ptr,
    memory_ptr,
    gates_ptr,
    experts_ptr,
    cosines_ptr,
    grad_h_ptr,
    B,
    h_stride,
    memory_stride,
    temperature,
    D: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Gradient of the rows: ``grad_h [B, D]`` from ``h [B, D]``, ``memory [E, D]`` and five tensors ``[B, K]``.

    ``grad_gates_ptr`` or ``grad_cosines_ptr`` is None where no gradient arrives.
    """
    sharpness = 1.0 / temperature
    b_memory_square = tl.zeros((BLOCK_E,), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        b_memory = _load_memory(memory_ptr, memory_stride, start, D, E, BLOCK_D, BLOCK_E)
        b_memory_square += tl.sum(b_memory * b_memory, 0)
    b_memory_scale = tl.rsqrt(tl.maximum(b_memory_square, EPS * EPS))
    if D <= BLOCK_D:
        b_memory = _load_memory(memory_ptr, memory_stride, 0, D, E, BLOCK_D, BLOCK_E)
        b_parts = _below_each_other(b_memory * b_memory_scale[None, :])
    # Each part of the memory meets the same coefficients.
    experts = tl.arange(0, 4 * BLOCK_E) % BLOCK_E

    for tile in tl.range(tl.program_id(0), tl.cdiv(B, BLOCK_M), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * BLOCK_M
        rows = tl.arange(0, BLOCK_M)
        m_rows = rows < B - tile * BLOCK_M
        if D <= BLOCK_D:
            b_h = _load_rows(h_ptr + first * h_stride, h_stride, rows, m_rows, 0, D, BLOCK_D)
            b_square = _square_norm(b_h)
        else:
            b_square = tl.zeros((BLOCK_M,), tl.float32)
            for start in tl.range(0, D, BLOCK_D):
                b_h = _load_rows(h_ptr + first * h_stride, h_stride, rows, m_rows, start, D, BLOCK_D)
                b_square += _square_norm(b_h)
        # A row too short has no direction. Neither has a bad one: NaN > EPS is false.
        m_direction = b_square > EPS * EPS
        b_scale = tl.where(m_direction, tl.rsqrt(tl.maximum(b_square, EPS * EPS)), 0.0)

        places = first * K + rows * K
        b_mean = tl.zeros((BLOCK_M,), tl.float32)
        if grad_gates_ptr is not None:
            for j in tl.static_range(K):
                b_gate = tl.load(gates_ptr + places + j, mask=m_rows, other=0.0)
                b_mean += b_gate * tl.load(grad_gates_ptr + places + j, mask=m_rows, other=0.0)
        b_coefficients = tl.zeros((BLOCK_M, 4 * BLOCK_E), tl.float32)
        b_along_row = tl.zeros((BLOCK_M,), tl.float32)
        for j in tl.static_range(K):
            b_grad = tl.zeros((BLOCK_M,), tl.float32)
            if grad_cosines_ptr is not None:
                b_grad += tl.load(grad_cosines_ptr + places + j, mask=m_rows, other=0.0)
            if grad_gates_ptr is not None:
                b_gate = tl.load(gates_ptr + places + j, mask=m_rows, other=0.0)
                b_grad_gate = tl.load(grad_gates_ptr + places + j, mask=m_rows, other=0.0)
                b_grad += b_gate * (b_grad_gate - b_mean) * sharpness
            b_expert = tl.load(experts_ptr + places + j, mask=m_rows, other=0)
            b_along_row += b_grad * tl.load(cosines_ptr + places + j, mask=m_rows, other=0.0)
            b_coefficients += tl.where(experts[None, :] == b_expert[:, None], b_grad[:, None], 0.0)
        b_coefficients = b_coefficients * b_scale[:, None]
        b_along_row = b_along_row * b_scale * b_scale

        for start in tl.range(0, D, BLOCK_D):
            columns = start + tl.arange(0, BLOCK_D)
            if D > BLOCK_D:
                b_h = _load_rows(h_ptr + first * h_stride, h_stride, rows, m_rows, start, D, BLOCK_D)
                b_memory = _load_memory(memory_ptr, memory_stride, start, D, E, BLOCK_D, BLOCK_E)
                b_parts = _below_each_other(b_memory * b_memory_scale[None, :])
            b_high, b_middle, b_low = _split(b_coefficients)
            b_grad_h = tl.dot(b_low, b_parts)
            b_grad_h = tl.dot(b_middle, b_parts, b_grad_h)
            b_grad_h = tl.dot(b_high, b_parts, b_grad_h) - b_along_row[:, None] * b_h.to(tl.float32)
            # The choice once more: 0 times the NaN of a bad row is NaN.
            b_grad_h = tl.where(m_direction[:, None], b_grad_h, 0.0).to(b_h.dtype)
            mask = m_rows[:, None] & (columns < D)[None, :]
            tl.store(grad_h_ptr + first * D + (rows[:, None] * D + columns[None, :]), b_grad_h, mask=mask)


def _addressable(x: Tensor) -> Tensor:
    """``x [B, D]`` itself, if features are adjacent and the rows of a tile lie within 2^31 elements; else a copy."""
    return x if x.stride(1) == 1 and x.stride(0) < 2**31 // 64 else x.contiguous()


def forward(h: Tensor, memory: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Launch: ``h [B, D]``, ``memory [E, D]`` float32 -> gates, experts, cosines, each ``[B, k]``."""
    rows, features = h.shape
    num_experts = memory.shape[0]
    gates = torch.empty((rows, k), dtype=torch.float32, device=h.device)
    experts = torch.empty((rows, k), dtype=torch.int32, device=h.device)
    cosines = torch.empty_like(gates)
    if rows == 0:
        return gates, experts, cosines
    h, memory = _addressable(h), _addressable(memory)
    config = configuration(rows, features, num_experts, h.dtype, machine_of(h.device), backward=False)
    cosine_topk_fwd_kernel[(config.programs,)](
        h,
        memory,
        gates,
        experts,
        cosines,
        rows,
        h.stride(0),
        memory.stride(0),
        temperature,
        D=features,
        E=num_experts,
        K=k,
        EPS=EPS,
        BLOCK_M=config.block_m,
        BLOCK_D=config.block_d,
        BLOCK_E=config.block_e,
        BLOCK_K=triton.next_power_of_2(k),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
    return gates, experts, cosines


def backward(
    grad_gates: Tensor | None,
    grad_cosines: Tensor | None,
    h: Tensor,
    memory: Tensor,
    gates: Tensor,
    experts: Tensor,
    cosines: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Launch the backward kernel: the gradient with respect to ``h``, contiguous ``[B, D]`` in its dtype."""
    rows, features = h.shape
    num_experts = memory.shape[0]
    grad_h = torch.empty((rows, features), dtype=h.dtype, device=h.device)
    if grad_h.numel() == 0:
        return grad_h
    if grad_gates is None and grad_cosines is None:
        return grad_h.zero_()
    h, memory = _addressable(h), _addressable(memory)
    config = configuration(rows, features, num_experts, h.dtype, machine_of(h.device), backward=True)
    cosine_topk_bwd_kernel[(config.programs,)](
        None if grad_gates is None else grad_gates.contiguous(),
        None if grad_cosines is None else grad_cosines.contiguous(),
        h,
        memory,
        gates.contiguous(),
        experts.contiguous(),
        cosines.contiguous(),
        grad_h,
        rows,
        h.stride(0),
        memory.stride(0),
        temperature,
        D=features,
        E=num_experts,
        K=experts.shape[1],
        EPS=EPS,
        BLOCK_M=config.block_m,
        BLOCK_D=config.block_d,
        BLOCK_E=config.block_e,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
    return grad_h
