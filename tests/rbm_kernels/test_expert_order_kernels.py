"""The order kernels, in Triton's interpreter without a GPU, and as compiled code."""

from itertools import combinations

import pytest
import torch
from known_triton import MOST_SPILLED

pytest.importorskip("triton")

from benchmarks.compiled.cases import ARCHITECTURES
from benchmarks.compiled.everywhere import compiled_everywhere
from rbm_kernels._ahead_of_time import compile_launches
from rbm_kernels._launching import Machine
from rbm_kernels.ops.expert_order import launch, op, reference

PATHS = ["select", "count"]
# Each shape exists for a reason: (B, E, k, block_m)
SHAPES = {
    "usual": (300, 8, 3, 128),
    "a block and one": (257, 5, 2, 64),
    "one row": (1, 3, 2, 16),
    "all experts": (90, 4, 4, 32),
    "one expert a row": (90, 6, 1, 32),
    "one set": (70, 1, 1, 16),
    "odd tile": (50, 9, 4, 7),
    "tile of one row": (20, 6, 2, 1),
    "tile above the rows": (20, 6, 2, 128),
    "one expert too many for a power of two": (70, 33, 2, 32),
}


def random_sets(rows: int, num_experts: int, k: int, device: str) -> torch.Tensor:
    return torch.rand(rows, num_experts).argsort(-1)[:, :k].int().contiguous().to(device)


def check(got, experts, num_experts, block_m) -> None:
    for a, b in zip(got, reference.expert_order(experts, num_experts, block_m), strict=True):
        assert a.dtype == torch.int32
        assert torch.equal(a, b)


@pytest.mark.parametrize("way", PATHS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.usefixtures("poisoned_empty")
def test_against_reference(shape, way, device, monkeypatch):
    monkeypatch.setattr(launch, "path", lambda *shapes: way)
    rows, num_experts, k, block_m = shape
    experts = random_sets(rows, num_experts, k, device)
    check(launch.expert_order(experts, num_experts, block_m), experts, num_experts, block_m)


@pytest.mark.parametrize(
    ("rows", "num_experts", "k", "block_m"),
    [(1100, 40, 6, 128), (70, 64, 8, 16), (8200, 8, 3, 128), (9000, 64, 2, 128), (2100, 64, 8, 256)],
)
@pytest.mark.usefixtures("poisoned_empty")
def test_the_way_that_the_rule_chooses(rows, num_experts, k, block_m, device):
    """Several shares each, and digits; ranks beyond 31 bits; the same bits twice."""
    experts = random_sets(rows, num_experts, k, device)
    got = launch.expert_order(experts, num_experts, block_m)
    check(got, experts, num_experts, block_m)
    again = launch.expert_order(experts, num_experts, block_m)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_shares_of_several_blocks(device, monkeypatch):
    """On a device with one multiprocessor: two shares of three blocks, of which the last is short."""
    monkeypatch.setattr(launch, "machine_of", lambda device: Machine(90, 1))
    experts = random_sets(5000, 8, 3, device)
    check(launch.expert_order(experts, 8, 256), experts, 8, 256)


def test_several_tiles_a_program(device, monkeypatch):
    """Eight, the last of which is short, and as many as their rows may be."""
    monkeypatch.setattr(launch, "machine_of", lambda device: Machine(90, 2))
    experts = random_sets(250, 9, 4, device)
    for block_m in (16, 1, 128):
        check(launch.expert_order(experts, 9, block_m), experts, 9, block_m)


def test_the_rule():
    assert launch.path(2708, 16) == launch.path(7650, 64) == launch.path(8192, 128) == "select"
    assert launch.path(8193, 128) == launch.path(300, 256) == "count"


@pytest.mark.parametrize("way", PATHS)
def test_extremes(way, device, monkeypatch):
    monkeypatch.setattr(launch, "path", lambda *shapes: way)
    every_set = torch.tensor(list(combinations(range(7), 3)), dtype=torch.int32, device=device)
    shuffled = every_set[torch.randperm(len(every_set), device=device)]
    check(launch.expert_order(shuffled, 7, 8), shuffled, 7, 8)
    one_set = torch.tensor([[4, 1, 6]], dtype=torch.int32, device=device).expand(300, 3)
    order, tile_experts, tile_counts = launch.expert_order(one_set, 7, 128)
    assert torch.equal(order, torch.arange(300, dtype=torch.int32, device=device))
    assert tile_experts[:, :3].tolist() == [[1, 4, 6]] * 3
    assert tile_counts.tolist() == [3, 3, 3]


@pytest.mark.parametrize("way", PATHS)
def test_strides(way, device, monkeypatch):
    monkeypatch.setattr(launch, "path", lambda *shapes: way)
    wide = random_sets(80, 9, 6, device)
    for experts in (wide[:, :3], wide[::2, :3], wide[:, ::2], wide.T.contiguous().T):
        check(launch.expert_order(experts, 9, 16), experts.contiguous(), 9, 16)


@pytest.mark.parametrize("way", PATHS)
def test_forbidden_sets_still_give_a_permutation(way, device, monkeypatch):
    """An expert named twice, or one that does not exist: no write may be outside the tensors."""
    monkeypatch.setattr(launch, "path", lambda *shapes: way)
    experts = random_sets(100, 6, 3, device)
    experts[10], experts[20], experts[30] = 2, 9, -1
    order, _, _ = launch.expert_order(experts, 6, 16)
    assert order.sort().values.tolist() == list(range(100))


def test_no_rows(device):
    order, tile_experts, tile_counts = launch.expert_order(random_sets(0, 6, 3, device), 6, 16)
    assert order.shape == tile_counts.shape == (0,)
    assert tile_experts.shape == (0, 6)


def test_registered_for_cuda_with_the_checks_of_the_eager_path(device):
    assert torch._C._dispatch_has_kernel_for_dispatch_key("rbm::expert_order", "CUDA")
    experts = random_sets(20, 6, 3, device)
    with pytest.raises(ValueError, match="block_m is 0, expected between 1 and"):
        op._cuda(experts, 6, 0)
    check(op._cuda(experts, 6, 8), experts, 6, 8)
    # A rank of 62 experts of 64 takes more than 64 bits on the way: the reference serves it.
    assert not op._kernels_serve(64, 62)
    many = random_sets(5, 64, 62, device)
    check(op._cuda(many, 64, 4), many, 64, 4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_code(architecture):
    rows = [row for _, row in compiled_everywhere("expert_order")[architecture]]
    assert {row.kernel.removeprefix("expert_order_").removesuffix("_kernel") for row in rows} == {
        "rank",
        "select",
        "count",
        "scatter",
        "tiles",
    }
    for row in rows:
        kernel = row.kernel.removeprefix("expert_order_").removesuffix("_kernel")
        assert row.spilled_bytes <= MOST_SPILLED, row
        # Converting the 64-bit ranks of 8,192 rows from one layout to another takes 64 KB; a program has its
        # multiprocessor to itself there.
        assert row.shared_bytes <= (64 if kernel == "select" else 16) * 1024, row
        assert row.programs * row.warps >= (16 if kernel in ("select", "scatter") else 24), row
        assert row.atomics == 0, row


SCATTER = """
import torch
from rbm_kernels.ops.expert_order import launch
launches = launch._prepare(20_000, {num_experts}, {k}, 128, 132)
ranks = torch.empty(20_000, dtype=launches.integer, device="meta")
order = torch.empty(20_000, dtype=torch.int32, device="meta")
launches.digits[{digit}].scatter(ranks, order, order, order, 20_000, launches.share)
"""


def every_scatter(monkeypatch) -> list[str]:
    """A launch for every width of a digit, the lowest digit and a higher one. Other numbers leave the layouts alone."""
    programs = {}
    monkeypatch.setattr(launch, "launcher", lambda kernel, grid, **constants: constants)
    for num_experts in range(1, 33):
        for k in range(1, num_experts + 1):
            for place, digit in enumerate(launch._prepare(20_000, num_experts, k, 128, 132).digits):
                kind = frozenset({**digit.scatter, "SHIFT": digit.scatter["SHIFT"] > 0}.items())
                programs.setdefault(kind, SCATTER.format(num_experts=num_experts, k=k, digit=place))
    return list(programs.values())


@pytest.mark.parametrize(
    "architecture", [pytest.param(a, marks=[] if a == 90 else [pytest.mark.slow]) for a in ARCHITECTURES]
)
def test_every_width_of_a_digit_compiles(architecture, monkeypatch):
    """With Triton 3.6, digits of up to three bits did not."""
    programs = every_scatter(monkeypatch)
    assert len(programs) >= 8
    compiled = list(compile_launches(programs, architecture, read_together=len(programs)))
    assert [place for place, _ in compiled] == list(range(len(programs)))
    assert all(kernel.spilled_bytes <= MOST_SPILLED for _, kernel in compiled)
