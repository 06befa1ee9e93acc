"""The order of rows: a stable permutation by set rank, and each tile's list of experts."""

from itertools import combinations, pairwise
from math import comb

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rbm_kernels import expert_order
from rbm_kernels.ops.expert_order.op import binomials
from rbm_kernels.ops.expert_order.reference import set_rank


def random_sets(rows: int, num_experts: int, k: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, num_experts, generator=generator).argsort(-1)[:, :k].int().contiguous()


@pytest.mark.parametrize(("num_experts", "k"), [(8, 3), (5, 2), (6, 1), (7, 4), (4, 4), (64, 2)])
def test_rank_numbers_all_sets_and_neighbours_differ_by_one_expert(num_experts, k):
    sets = torch.tensor(list(combinations(range(num_experts), k)), dtype=torch.int32)
    rank = set_rank(sets, num_experts)
    assert sorted(rank.tolist()) == list(range(comb(num_experts, k)))
    in_order = [set(row) for row in sets[rank.argsort()].tolist()]
    assert all(len(a & b) == k - 1 for a, b in pairwise(in_order))


def test_binomials_without_the_function_of_the_library():
    assert binomials(60, 60) == [comb(60, size) for size in range(61)]
    assert binomials(3, 5) == [1, 3, 3, 1, 0, 0]
    assert binomials(0, 0) == [1]


def test_rank_ignores_the_order_within_a_row():
    sets = random_sets(50, 9, 4)
    assert torch.equal(set_rank(sets, 9), set_rank(sets.flip(-1), 9))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 70), st.integers(1, 9), st.integers(1, 4), st.integers(1, 40), st.integers(0, 99))
def test_order_and_tiles(rows, num_experts, k, block_m, seed):
    k = min(k, num_experts)
    experts = random_sets(rows, num_experts, k, seed)
    order, tile_experts, tile_counts, _ = expert_order(experts, num_experts, block_m)
    assert order.dtype == tile_experts.dtype == tile_counts.dtype == torch.int32

    rank = set_rank(experts, num_experts).tolist()
    assert order.tolist() == sorted(range(rows), key=lambda row: (rank[row], row))
    tiles = -(-rows // block_m)
    assert tile_experts.shape == (tiles, num_experts)
    for tile in range(tiles):
        used = sorted(
            {e for row in order[tile * block_m : (tile + 1) * block_m].tolist() for e in experts[row].tolist()}
        )
        assert tile_counts[tile] == len(used)
        assert tile_experts[tile].tolist() == used + [-1] * (num_experts - len(used))


def test_union_grows_by_one_where_a_tile_straddles_two_sets():
    sets = torch.tensor(list(combinations(range(8), 3)), dtype=torch.int32).repeat_interleave(128, dim=0)
    shuffled = sets[torch.randperm(len(sets))]
    # Every set fills one tile; shifted by half a tile, every inner tile straddles two neighbouring sets.
    assert (expert_order(shuffled, 8, 128).tile_counts == 3).all()
    shifted = torch.cat([shuffled, sets[:1].expand(64, 3)])
    assert expert_order(shifted, 8, 128).tile_counts.max() <= 4


def test_opcheck():
    torch.library.opcheck(torch.ops.rbm.expert_order.default, (random_sets(20, 6, 3), 6, 8))
    torch.library.opcheck(torch.ops.rbm.expert_order.default, (random_sets(0, 6, 3), 6, 8))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"experts": torch.zeros(4, 2, dtype=torch.int64)}, TypeError, "experts has dtype int64, expected int32"),
        ({"experts": torch.zeros(4, dtype=torch.int32)}, ValueError, r"experts has shape \[4\], expected \[\*, \*\]"),
        ({"num_experts": 1}, ValueError, "k is 2, expected between 1 and the number of experts, 1"),
        ({"block_m": 0}, ValueError, "block_m is 0, expected between 1 and"),
    ],
)
def test_bad_arguments(change, error, message):
    arguments = {"experts": torch.zeros(4, 2, dtype=torch.int32), "num_experts": 3, "block_m": 16, **change}
    with pytest.raises(error, match="rbm::expert_order: " + message):
        expert_order(**arguments)
