"""The configuration entries that ``benchmarks.tuning.tune`` may change, each with a finite set of candidates.

``rbm_kernels`` does not know about this: a candidate temporarily replaces the entry while it is compiled or timed.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton

from benchmarks.compiled.cases import Case, multiplied_as
from benchmarks.measure.precision import DTYPES
from rbm_kernels._launching import Machine, forget_prepared, machine_of
from rbm_kernels.ops.cosine_topk import config as cosine_topk_config
from rbm_kernels.ops.cosine_topk import launch as cosine_topk_launch
from rbm_kernels.ops.expert_matmul import config
from rbm_kernels.ops.expert_matmul.config import Tile
from rbm_kernels.ops.memory_update import config as memory_config
from rbm_kernels.ops.memory_update import launch as memory_launch
from rbm_kernels.ops.routed_matmul import config as routed_config

Candidate = tuple | int


@dataclass(frozen=True)
class Tunable(ABC):
    """One entry of a configuration, and its possible values.

    ``labels`` are the launches of :mod:`benchmarks.compiled.cases` that it affects. All of them must compile well; the
    first is timed. ``kernel`` is the kernel whose machine code is examined.
    """

    operator: str
    name: str
    labels: tuple[str, ...]
    kernel: str

    def affects(self, case: Case) -> bool:
        """Whether a case launches the kernel that the entry configures."""
        return True

    @abstractmethod
    def candidates(self, case: Case, architecture: int) -> list[Candidate]:
        """The values to try, starting with the current entry."""

    @abstractmethod
    def using(self, candidate: Candidate, case: Case, architecture: int) -> AbstractContextManager[None]:
        """Temporarily replace the entry by a candidate."""

    def line(self, candidate: Candidate, case: Case, architecture: int) -> str:
        """The candidate as source code for config.py; by default with its named fields."""
        return repr(candidate)

    def holding(self, candidate: Candidate, programs: int) -> Candidate:
        """The candidate with the number of programs that fit on a multiprocessor."""
        return candidate


@dataclass(frozen=True)
class MatmulTile(Tunable):
    """An entry in a table of the grouped matmul; ``sums`` float32 accumulators have the size of the tile."""

    sums: int

    def _table(self, case: Case) -> str:
        """Many experts are processed in several passes, which have a separate table."""
        in_passes = config.passes(case.rows, case.num_experts, case.top_k) > 1 and self.name != "_WEIGHT"
        return f"{self.name}_IN_PASSES" if in_passes else self.name

    def _entry(self, case: Case, architecture: int) -> tuple[dict, tuple[str, int]]:
        table = getattr(config, self._table(case))
        return table, config.entry(table, multiplied_as(case), architecture, case.in_features, case.out_features)

    def affects(self, case: Case) -> bool:
        """False for the weight's gradient of few rows."""
        return self.name != "_WEIGHT" or _lists_rows(case)

    def candidates(self, case: Case, architecture: int) -> list[Candidate]:
        """Tiles whose sums take 8 to 128 registers per thread."""
        table, key = self._entry(case, architecture)
        exact = case.precision == "float32"
        sides = (32, 64, 128) if exact else (64, 128, 256)
        # For the weight's gradient, slices are of rows. Elsewhere a slice of the features stays in memory: deep slices.
        by_rows = self.name == "_WEIGHT"
        depths = (16, 32) if exact else (32, 64) if by_rows else (64, 128, 256)
        stages = (2, 3, 4) if by_rows else (1, 2, 3)
        found = [table[key]]
        for block_m, block_n, block_k, warps, depth in product(sides, sides, depths, (4, 8), stages):
            sums = self.sums * block_m * block_n // (32 * warps)
            if 8 <= sums <= (32 if exact else 128) and (block_m <= 128 or self.name == "_WEIGHT"):
                found.append(Tile(block_m, block_n, block_k, warps, depth))
        return list(dict.fromkeys(found))

    def using(self, candidate: Candidate, case: Case, architecture: int) -> AbstractContextManager[None]:
        """Replace the table's entry."""
        return replaced(*self._entry(case, architecture), candidate)

    def line(self, candidate: Candidate, case: Case, architecture: int) -> str:
        """An entry of the table."""
        precision, known = self._entry(case, architecture)[1]
        values = [f"{value}" for value in candidate[: 5 if candidate.programs == 1 else 6]]
        values += ["all_registers=True"] if candidate.all_registers else []
        table = self._table(case)
        where = "" if table == self.name else f"  # {table}"
        return f'("{precision}", {known}): Tile({", ".join(values)}),{where}'

    def holding(self, candidate: Candidate, programs: int) -> Candidate:
        """Set the tile's number of programs per multiprocessor."""
        return candidate._replace(programs=programs)


@dataclass(frozen=True)
class WeightWaves(Tunable):
    """Number of waves of programs for the weight's gradient."""

    def affects(self, case: Case) -> bool:
        """False for few rows."""
        return _lists_rows(case)

    def candidates(self, case: Case, architecture: int) -> list[Candidate]:
        """One to four waves."""
        return list(dict.fromkeys((config._WEIGHT_WAVES[multiplied_as(case)], 1, 2, 3, 4)))

    def using(self, candidate: Candidate, case: Case, architecture: int) -> AbstractContextManager[None]:
        """Replace the number."""
        return replaced(config._WEIGHT_WAVES, multiplied_as(case), candidate)

    def line(self, candidate: Candidate, case: Case, architecture: int) -> str:
        """The number."""
        return f'_WEIGHT_WAVES["{multiplied_as(case)}"] = {candidate}'


@dataclass(frozen=True)
class RoutingConfiguration(Tunable):
    """Configuration of a routing kernel. There is no table; a person adapts the rule to the outcome."""

    backward: bool

    def candidates(self, case: Case, architecture: int) -> list[Candidate]:
        """Tiles of rows by features, warps and stages; the programs follow from the tile as in config.py."""
        machine = _machine(architecture)
        shape = (case.rows, case.in_features, case.num_experts, DTYPES[case.precision])
        found = [cosine_topk_config.configuration(*shape, machine, backward=self.backward)]
        widths = [width for width in (32, 64, 128, 256) if width <= triton.next_power_of_2(case.in_features)]
        for block_m, block_d, warps, stages in product((16, 32, 64, 128), widths, (4, 8), (1, 2, 3)):
            tiles = triton.cdiv(case.rows, block_m)
            whole = case.in_features <= block_d
            programs = min(tiles, 2 * machine.multiprocessors) if whole else tiles
            cut = (block_m, block_d, found[0].block_e, warps, stages, programs)
            # Registers hold a row's parts and its products with the parts of the memory at the same time.
            if block_m * (block_d + 4 * found[0].block_e) <= 32 * warps * 160:
                found.append(cosine_topk_config.Configuration(*cut))
        return list(dict.fromkeys(found))

    def using(self, candidate: Candidate, case: Case, architecture: int) -> AbstractContextManager[None]:
        """Replace the rule's result."""
        return replaced(vars(cosine_topk_launch), "configuration", lambda *shape, backward: candidate)


@dataclass(frozen=True)
class MemoryConfiguration(Tunable):
    """Configuration of the memory update's sums. There is no table; a person adapts the rule to the outcome."""

    def candidates(self, case: Case, architecture: int) -> list[Candidate]:
        """Tiles of rows by experts, with all features up to 256; warps, stages, programs. Shares are one wave."""
        machine = _machine(architecture)
        shape = (case.rows, case.in_features, case.num_experts, DTYPES[case.precision])
        found = [memory_config.configuration(*shape, machine)]
        widest = max(8, triton.next_power_of_2(case.num_experts))
        sizes = [size for size in (8, 16, 32) if size <= widest]
        for block_m, block_e, warps, stages, programs in product((8, 16, 32, 64), sizes, (4, 8), (1, 2, 3), (1, 2)):
            if (block_m < 16) != (case.precision == "float64"):  # no matrix instructions are used for float64
                continue
            tiles = triton.cdiv(case.in_features, found[0].block_d) * triton.cdiv(case.num_experts, block_e)
            shares = max(1, min(triton.cdiv(case.rows, block_m), programs * machine.multiprocessors // tiles))
            cut = {"block_m": block_m, "block_e": block_e, "num_warps": warps, "num_stages": stages}
            found.append(found[0]._replace(**cut, programs=programs, tiles=tiles, shares=shares))
        return list(dict.fromkeys(found))

    def using(self, candidate: Candidate, case: Case, architecture: int) -> AbstractContextManager[None]:
        """Replace the rule's result."""
        return replaced(vars(memory_launch), "configuration", lambda *shape: candidate)


@dataclass(frozen=True)
class RoutedTile(Tunable):
    """Configuration of a layer for few rows. There is no table; a person adapts the rule to the outcome."""

    def candidates(self, case: Case, architecture: int) -> list[Candidate]:
        """Columns, slices of the product and of the routing, warps and stages."""
        shape = (case.rows, case.in_features, case.out_features, case.num_experts, DTYPES[case.precision])
        found = [routed_config.choose_tile(*shape, _machine(architecture))]
        width = max(16, triton.next_power_of_2(case.in_features))
        slices = dict.fromkeys(min(width, size) for size in (64, 128, 256))
        for block_n, block_k, block_d, warps, stages in product((16, 32), slices, slices, (4, 8), (1, 2, 4)):
            if block_d * found[0].block_e <= 4096:
                cut = {"block_n": block_n, "block_k": block_k, "block_d": block_d}
                found.append(found[0]._replace(**cut, num_warps=warps, num_stages=stages))
        return list(dict.fromkeys(found))

    def using(self, candidate: Candidate, case: Case, architecture: int) -> AbstractContextManager[None]:
        """Replace the rule's result."""
        return replaced(vars(routed_config), "choose_tile", lambda *shape: candidate)


TUNABLES = (
    RoutingConfiguration("cosine_topk", "forward", ("gates, experts, cosines",), "cosine_topk_fwd_kernel", False),
    RoutingConfiguration("cosine_topk", "backward", ("grad_h",), "cosine_topk_bwd_kernel", True),
    MatmulTile("expert_matmul", "_FORWARD", ("y", "grad_x"), "expert_matmul_fwd_kernel", sums=2),
    MatmulTile("expert_matmul", "_BACKWARD", ("grad_x, grad_gates",), "expert_matmul_bwd_kernel", sums=2),
    MatmulTile("expert_matmul", "_WEIGHT", ("grad_weight, grad_bias",), "expert_matmul_bwd_weight_kernel", sums=1),
    WeightWaves("expert_matmul", "_WEIGHT_WAVES", ("grad_weight, grad_bias",), "expert_matmul_bwd_weight_kernel"),
    MemoryConfiguration("memory_update", "sums", ("weighted_sum, total",), "memory_statistics_kernel"),
    RoutedTile("routed_matmul", "tile", ("y",), "routed_matmul_fwd_kernel"),
)


def _lists_rows(case: Case) -> bool:
    """Whether the weight's gradient lists each expert's rows; if not, a kernel with its own tile reads all of them."""
    weights = case.num_experts * case.out_features * case.in_features
    return not config.sums_all_rows(case.rows, case.top_k, case.num_experts, weights)


def _machine(architecture: int) -> Machine:
    """This machine's GPU; without one, a GPU of this architecture with as many multiprocessors as an H200."""
    return machine_of(torch.device("cuda")) if torch.cuda.is_available() else Machine(architecture, 132)


@contextmanager
def replaced(table: dict, key: Any, value: Any) -> Iterator[None]:
    """Temporarily replace a value. Launches are prepared again with the new value, and afterwards."""
    before = table[key]
    table[key] = value
    forget_prepared()
    try:
        yield
    finally:
        table[key] = before
        forget_prepared()
