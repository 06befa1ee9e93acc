"""How many launches an order takes and how much memory, counted on tensors that hold nothing."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from rbm_kernels._launching import CPU_STANDS_FOR
from rbm_kernels.ops.expert_matmul.config import tile_rows
from rbm_kernels.ops.expert_order import launch

# Operators of PyTorch that launch nothing.
FREE = {"empty", "empty_like", "detach", "view", "slice", "t"}


class Recorded(TorchDispatchMode):
    """Names of what would be launched, kernels and operators of PyTorch, and bytes of all new tensors."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.launches: list[str] = []
        self.allocated = 0
        monkeypatch.setattr(launch, "launcher", self._launcher)
        monkeypatch.setattr(launch, "machine_of", lambda device: CPU_STANDS_FOR)

    def _launcher(self, kernel, grid, **constants):
        return lambda *arguments: self.launches.append(kernel.fn.__name__)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if name not in FREE:
            self.launches.append(name)
        if not any(output.alias_info for output in function._schema.returns):
            self.allocated += result.nbytes
        return result


def record(monkeypatch, rows, num_experts, k, block_m=None) -> tuple[list[str], int]:
    """Launches, and bytes beyond the results and the arguments."""
    experts = torch.empty(rows, k, dtype=torch.int32, device="meta")
    with Recorded(monkeypatch) as recorded:
        results = launch.expert_order(experts, num_experts, block_m or tile_rows(rows))
    return recorded.launches, recorded.allocated - sum(result.nbytes for result in results)


@pytest.mark.parametrize(
    ("rows", "num_experts", "k", "launches"),
    [
        (256, 8, 3, 1),
        (2_708, 8, 3, 1),
        (4_096, 8, 3, 1),
        (7_650, 8, 3, 1),
        (169_343, 8, 3, 3),
        (2_449_029, 8, 3, 3),
        (2_708, 64, 8, 2),  # ranks, and what each tile selects by them
        (169_343, 16, 4, 5),
        (2_449_029, 64, 2, 5),
        (169_343, 64, 4, 7),
        (169_343, 64, 8, 11),
    ],
)
def test_launches(rows, num_experts, k, launches, monkeypatch):
    names, _ = record(monkeypatch, rows, num_experts, k)
    assert len(names) == launches, names
    assert all(name.startswith("expert_order_") for name in names)


@pytest.mark.parametrize("rows", [1, 2_708, 8_192, 8_193, 169_343, 2_449_029])
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (8, 3), (9, 4), (64, 2), (33, 3), (64, 4), (64, 8)])
def test_memory(rows, num_experts, k, monkeypatch):
    """Ranks of at most 8 bytes, a second order of 4, and a table of at most 128 counts a multiprocessor."""
    _, held = record(monkeypatch, rows, num_experts, k)
    assert held <= 12 * rows + 512 * CPU_STANDS_FOR.multiprocessors
    if num_experts == 8:
        assert held <= 4 * rows + 512 * CPU_STANDS_FOR.multiprocessors
        assert (held == 0) == (rows <= 8_192)


@pytest.mark.parametrize(
    ("rows", "block_m", "height"),
    [(1, 128, 128), (10, 2**31 - 1, 128), (130, 2**31 - 1, 256), (130, 200, 200), (9_000, 2**31 - 1, 2**14)],
)
def test_kernels_do_not_go_through_the_empty_part_of_a_tile(rows, block_m, height, monkeypatch):
    """At 2^31 - 1 rows of a tile the loop's counter would also overflow, and the loop not end."""
    heights = set()
    monkeypatch.setattr(launch, "launcher", lambda *_, **constants: heights.add(constants.get("TILE")))
    prepared = launch._prepare.__wrapped__(rows, 8, 2, block_m, 132)
    assert (prepared.tiles, heights - {None}) == (1, {height})


def test_strided_columns_are_copied(monkeypatch):
    experts = torch.empty(3, 20_000, dtype=torch.int32, device="meta").T
    with Recorded(monkeypatch) as recorded:
        launch.expert_order(experts, 8, 128)
    assert recorded.launches[0] == "clone"
    assert len(recorded.launches) == 4
