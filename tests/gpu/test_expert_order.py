"""The order of rows on a GPU: integers, equal to the reference's to the last one, by each way that it is found."""

from itertools import combinations

import pytest
import torch
from on_gpu import (
    OperatorOnGpu,
    check_compiled,
    check_peak,
    full_only,
)

from rbm_kernels import expert_order
from rbm_kernels.ops.expert_order import pass_columns, reference

# A tile of more rows than tiles select for themselves: any number of rows is counted by digits.
HIGH = 256
# (B, E, k). The way is chosen by shape: each tile selects its rows, or rows are counted by digits of their rank.
SHAPES = {
    "reference, one digit": (169_343, 8, 3),
    "16 experts, two digits": (169_343, 16, 4),
    "64 experts, five digits": (169_343, 64, 8),
    "64 experts, two digits": (2_449_029, 64, 2),
    "33 experts, two digits": (2_449_029, 33, 3),
    "few rows, select": (1_024, 8, 3),
    "most rows, select": (8_192, 8, 3),
    "ranks beyond 31 bits, select": (1_000, 64, 8),
    "one expert": (20_000, 1, 1),
    "one row": (1, 3, 2),
    "all experts": (20_000, 4, 4),
    "a row more than select takes": (8_193, 8, 3),
}


def small(rows: int) -> int:
    """Rows of the rehearsal: few, and few beyond the 8,192 that tiles select from where it were more."""
    return 8_200 if rows > 8_192 else min(rows, 60)


CORE = ("reference, one digit", "64 experts, five digits", "few rows, select")
SLOW = (
    "16 experts, two digits",
    "64 experts, five digits",
    "64 experts, two digits",
    "33 experts, two digits",
    "few rows, select",
    "one expert",
    "all experts",
)
CASES = [
    pytest.param(*shape, id=name, marks=[pytest.mark.core] * (name in CORE) + [pytest.mark.gpu] * (name in SLOW))
    for name, shape in SHAPES.items()
]


def random_sets(gpu, rows, num_experts, k, seed=0) -> torch.Tensor:
    generator = torch.Generator(gpu.name).manual_seed(seed)
    experts = torch.rand(rows, num_experts, generator=generator, device=gpu.name).argsort(-1)
    return experts[:, :k].int().contiguous()


def check(got, experts, num_experts, block_m) -> None:
    for a, b in zip(got[:3], reference.expert_order(experts, num_experts, block_m), strict=True):
        assert a.dtype == torch.int32
        assert torch.equal(a, b)


@pytest.mark.parametrize(("rows", "num_experts", "k"), CASES)
def test_shapes(rows, num_experts, k, gpu):
    experts = random_sets(gpu, gpu.size(rows, small(rows)), num_experts, k)
    check(expert_order(experts, num_experts), experts, num_experts, 128)


@pytest.mark.parametrize("k", [1, 8, *full_only(2, 3, 4, 5, 6, 7)])
def test_top_k(k, gpu):
    """One digit or two."""
    experts = random_sets(gpu, gpu.size(20_000, 100), 16, k)
    check(expert_order(experts, 16), experts, 16, 128)


@pytest.mark.parametrize("block_m", [7, *full_only(1, 16, 32, 64, 128, 200, 4_096)])
@pytest.mark.parametrize("rows", [pytest.param(20_001, id="many rows"), pytest.param(300, id="few rows")])
def test_any_height_of_tile(rows, block_m, gpu):
    rows = gpu.size(rows, min(rows, 400))
    experts = random_sets(gpu, rows, 9, 4)
    check(expert_order(experts, 9, block_m), experts, 9, block_m)


@pytest.mark.parametrize("passes", [2, *full_only(3, 8)])
def test_passes(passes, gpu):
    """Each pass orders its own columns, which are a view with the stride of all of them."""
    experts = random_sets(gpu, gpu.size(20_000, 60), 64, 8)
    got = expert_order(experts, 64, 128, passes)
    for number, columns in enumerate(pass_columns(8, passes)):
        check([part[number] for part in got[:3]], experts[:, columns], 64, 128)


@pytest.mark.parametrize("rows", [pytest.param(20_000, id="many rows"), *full_only(800)])
def test_every_set_and_one_set(rows, gpu):
    every_set = torch.tensor(list(combinations(range(7), 3)), dtype=torch.int32, device=gpu.name)
    shuffled = every_set.repeat(gpu.size(rows, 70) // 35, 1)
    shuffled = shuffled[torch.randperm(len(shuffled), device=gpu.name)]
    check(expert_order(shuffled, 7, 16), shuffled, 7, 16)
    one_set = torch.tensor([[4, 1, 6]], dtype=torch.int32, device=gpu.name).expand(len(shuffled), 3)
    order, tile_experts, tile_counts, _ = expert_order(one_set, 7, 16)
    assert torch.equal(order, torch.arange(len(shuffled), dtype=torch.int32, device=gpu.name))
    assert (tile_counts == 3).all()
    assert (tile_experts[:, :3] == torch.tensor([1, 4, 6], device=gpu.name)).all()


@pytest.mark.parametrize("rows", [pytest.param(20_000, id="many rows"), *full_only(800)])
def test_strides(rows, gpu):
    wide = random_sets(gpu, gpu.size(rows, 80), 9, 6)
    for experts in (wide[:, :3], wide[::2, :3], wide[:, ::2], wide.T.contiguous().T):
        check(expert_order(experts, 9, 16), experts.contiguous(), 9, 16)


@pytest.mark.parametrize("num_experts", [6, *full_only(64)])
def test_forbidden_sets_still_give_a_permutation(num_experts, gpu):
    """An expert named twice, or one that does not exist: no write may leave the tensors."""
    rows = gpu.size(20_000, 1_030)
    experts = random_sets(gpu, rows, num_experts, 3)
    experts[10], experts[20], experts[30] = 2, num_experts + 3, -1
    order = expert_order(experts, num_experts, HIGH).order
    assert torch.equal(order.sort().values, torch.arange(rows, dtype=torch.int32, device=gpu.name))


def test_no_rows(gpu):
    order, tile_experts, tile_counts, _ = expert_order(random_sets(gpu, 0, 6, 3), 6, 16)
    assert order.shape == tile_counts.shape == (0,)
    assert tile_experts.shape == (0, 6)


# Of each way one: (B, E, k, block_m).
WAYS = [
    pytest.param(20_000, 8, 3, HIGH, id="one digit"),
    pytest.param(500, 8, 3, 64, id="select"),
    pytest.param(20_000, 64, 8, 64, id="five digits", marks=pytest.mark.gpu),
]


@pytest.mark.core
@pytest.mark.parametrize(("rows", "num_experts", "k", "block_m"), WAYS)
class TestOperator(OperatorOnGpu):
    @pytest.fixture
    def draw(self, rows, num_experts, k, gpu):
        return lambda seed: (random_sets(gpu, gpu.size(rows, min(rows, 600)), num_experts, k, seed),)

    @pytest.fixture
    def call(self, num_experts, block_m):
        return lambda experts: torch.ops.rbm.expert_order(experts, num_experts, block_m)

    def test_peak_memory(self, call, draw, num_experts, block_m, gpu):
        """Results; ranks of at most 8 bytes, a second order of 4, and 128 counts of 4 a multiprocessor, here 256."""
        (experts,) = draw(0)
        rows, tiles = len(experts), -(-len(experts) // block_m)
        check_peak(gpu, call, draw, rows * (4 + 12) + tiles * (num_experts + 1) * 4 + 256 * 512)


def test_compiled(gpu):
    check_compiled(
        gpu,
        lambda experts: torch.ops.rbm.expert_order(experts, 6, 64),
        lambda seed: (random_sets(gpu, 60, 6, 3, seed),),
    )


def test_opcheck(gpu):
    torch.library.opcheck(torch.ops.rbm.expert_order.default, (random_sets(gpu, 30, 6, 3), 6, 16))
