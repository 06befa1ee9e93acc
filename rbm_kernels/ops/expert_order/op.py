"""``torch.ops.rbm.expert_order``: schema, checks, fake implementation. Integers in, integers out: no derivative."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rbm_kernels import checks
from rbm_kernels._launching import prepared
from rbm_kernels._library import define, implement_cuda, implement_everywhere, implement_fake
from rbm_kernels._vmap import implement_vmap
from rbm_kernels.ops.expert_order import reference

define(
    "expert_order(Tensor experts, int num_experts, int block_m)"
    " -> (Tensor order, Tensor tile_experts, Tensor tile_counts)"
)

# The table of binomials and the list of each tile's experts have a place for every expert.
MOST_EXPERTS = 2**20


class ExpertOrder(NamedTuple):
    """Result of :func:`expert_order`: int32 tensors, and the tile height that they were made for.

    With several passes every tensor has an additional first dimension, with one order per pass.
    """

    order: Tensor
    tile_experts: Tensor
    tile_counts: Tensor
    block_m: int


def pass_columns(k: int, passes: int) -> list[slice]:
    """Columns of ``experts [B, k]`` for each pass: contiguous, of equal size or one more in the first passes."""
    ends = [-(-k * number // passes) for number in range(passes + 1)]
    return [slice(first, last) for first, last in pairwise(ends)]


def binomials(n: int, most: int) -> list[int]:
    """The numbers of sets of 0, 1, ... ``most`` of ``n`` things."""
    sets = [1]  # torch 2.15 cannot trace math.comb on Python 3.15
    for size in range(most):
        sets.append(sets[size] * (n - size) // (size + 1))
    return sets


def widest_number(num_experts: int, k: int) -> int:
    """The largest number in the computation of a rank: the sum of at most k binomials, or one before its division."""
    return max(binomials(num_experts, k)) * num_experts


def ranks_fit(num_experts: int, k: int) -> bool:
    """Whether the kernels can rank the sets of ``k`` of ``num_experts`` experts in 64 bits."""
    return widest_number(num_experts, k) < 2**63


def expert_order(experts: Tensor, num_experts: int, block_m: int = 128, passes: int = 1) -> ExpertOrder:
    """Order rows so that rows with the same *set* of experts are adjacent.

    Args:
        experts: int32 ``[B, k]``, as returned by :func:`rbm_kernels.cosine_topk`: k different experts per row, each in
            ``[0, num_experts)``. The order of the k experts within a row does not matter.
        num_experts: ``E``, at most 2^20.
        block_m: rows per tile; at least 1.
        passes: number of groups into which the columns of ``experts`` are split, at most k. With more than 1, each
            group is ordered separately, and the tensors have an additional first dimension. With many experts a row's
            whole set is too rare for a tile; :func:`rbm_kernels.ops.expert_matmul.config.passes` chooses a number.

    Returns:
        ``order [B]``: a stable permutation of the rows, by the rank of their set in revolving-door order.
        ``tile_experts [ceil(B / block_m), E]``: for each tile of ordered rows, the experts that at least one of its
        rows uses, ascending, then -1. ``tile_counts [ceil(B / block_m)]``: the number of these experts. ``block_m``
        itself.

    Raises:
        TypeError: ``experts`` is not int32.
        ValueError: ``experts`` is not two-dimensional, has more than ``num_experts`` columns, ``num_experts``
            is not between 1 and 2^20, ``block_m < 1``, or ``passes`` is not between 1 and k.
        RuntimeError: there are more than 2^63 sets of up to k of the E experts of a pass, too many to rank; on the CPU,
            an expert is out of range.
    """
    try:
        return _in_passes(experts, num_experts, block_m, passes)
    except (RuntimeError, IndexError):
        # C++ implementations can only raise RuntimeError, so repeat their checks here to raise the right class.
        _check(experts, num_experts, block_m)
        raise


def _in_passes(experts: Tensor, num_experts: int, block_m: int, passes: int) -> ExpertOrder:
    if passes == 1:
        return ExpertOrder(*torch.ops.rbm.expert_order(experts, num_experts, block_m), block_m)
    _check(experts, num_experts, block_m)
    if not checks.is_within("expert_order", "passes", passes, 1, experts.shape[-1]):
        raise ValueError(
            f"rbm::expert_order: passes is {passes}, expected between 1 and the experts of a row, {experts.shape[-1]}"
        )
    orders = [
        torch.ops.rbm.expert_order(experts[:, columns], num_experts, block_m)
        for columns in pass_columns(experts.shape[1], passes)
    ]
    return ExpertOrder(*(torch.stack(tensors) for tensors in zip(*orders, strict=True)), block_m)


def _check(experts: Tensor, num_experts: int, block_m: int) -> None:
    checks.check_dtype("expert_order", "experts", experts, (torch.int32,))
    checks.check_shape("expert_order", "experts", experts, (None, None), "rows by experts a row")
    if not checks.is_within("expert_order", "num_experts", num_experts, 1, MOST_EXPERTS):
        raise ValueError(
            f"rbm::expert_order: num_experts is {num_experts}, expected between 1 and {MOST_EXPERTS}: every tile lists"
            " all experts"
        )
    checks.check_top_k("expert_order", experts.shape[1], num_experts)
    if not checks.is_within("expert_order", "block_m", block_m, 1, checks.MOST_SIZE):
        raise ValueError(f"rbm::expert_order: block_m is {block_m}, expected between 1 and {checks.MOST_SIZE}")


@implement_everywhere("expert_order")
def _eager(experts: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor, Tensor]:
    _check(experts, num_experts, block_m)
    checks.check_indices("expert_order", "experts", experts, num_experts)
    top_k = experts.shape[1]
    if max(binomials(num_experts, top_k)) > 2**63 - 1:
        raise RuntimeError(
            f"rbm::expert_order: there are more than 2^63 sets of up to {top_k} of {num_experts} experts, too many to"
            " rank: order them in several passes"
        )
    return reference.expert_order(experts, num_experts, block_m)


def _fake(experts: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor, Tensor]:
    _check(experts, num_experts, block_m)
    tiles = (experts.shape[0] + block_m - 1) // block_m
    return (
        experts.new_empty((experts.shape[0],)),
        experts.new_empty((tiles, num_experts)),
        experts.new_empty((tiles,)),
    )


@prepared
def _kernels_serve(num_experts: int, k: int) -> bool:
    """Whether the Triton kernels compute this: ranks fit in 64 bits, and a tile's experts in registers."""
    return ranks_fit(num_experts, k) and num_experts <= 2048


@implement_cuda("expert_order", _check)
def _cuda(experts: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor, Tensor]:
    if not _kernels_serve(num_experts, experts.shape[1]):
        return _eager(experts, num_experts, block_m)
    from rbm_kernels.ops.expert_order import launch

    return launch.expert_order(experts, num_experts, block_m)


implement_fake("expert_order", _fake)
implement_vmap("expert_order")
