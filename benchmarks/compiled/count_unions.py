"""Counts the experts that a tile of ordered rows needs: the data for ``expert_matmul``'s rule for many experts.

``python -m benchmarks.compiled.count_unions [OUT.csv]`` writes ``benchmarks/results/unions.csv``; it needs no GPU and
takes minutes. There is one row for each routing, shape and ordering, with the sum of the mean unions of all passes: the
number of experts that a row is multiplied with. ``predicted`` is the estimate of the rule, and ``chosen`` tells whether
the rule chooses that number of passes.
"""

import csv
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from rbm_kernels.ops.expert_matmul import config
from rbm_kernels.ops.expert_order import pass_columns
from rbm_kernels.ops.expert_order.reference import set_rank

ROWS = (18_333, 169_343, 2_449_029)  # Coauthor-CS, ogbn-arxiv, ogbn-products
EXPERTS = (8, 16, 32, 64)
PASSES = {3: (1, 2, 3), 8: (1, 2, 3, 4, 8)}
COLUMNS = ("routing", "rows", "experts", "k", "block_m", "order", "columns", "passes", "union", "predicted", "chosen")
# Rows drawn at once, each with 64 scores.
_CHUNK = 65_536
# Clusters and features of the clustered routing.
_CLUSTERS, _FEATURES = 40, 32


def uniform(rows: int, num_experts: int, k: int, generator: torch.Generator) -> Tensor:
    """All sets of experts are equally likely."""
    return torch.rand(rows, num_experts, generator=generator).topk(k).indices


def skewed(rows: int, num_experts: int, k: int, generator: torch.Generator) -> Tensor:
    """Expert e is e times less likely than the first (Zipf), without replacement (Gumbel top-k)."""
    noise = -torch.empty(rows, num_experts).exponential_(generator=generator).log()
    return (noise - torch.arange(1, num_experts + 1).log()).topk(k).indices


def clustered(rows: int, num_experts: int, k: int, generator: torch.Generator) -> Tensor:
    """Routing by cosines, as in the layer, of rows around cluster centres. Cluster sizes follow Zipf's law.

    Centres and memory vectors are the same for all rows of a shape, because they have a separate generator.
    """
    fixed = torch.Generator().manual_seed(num_experts)
    centres = torch.randn(_CLUSTERS, _FEATURES, generator=fixed)
    near = torch.randint(_CLUSTERS, (num_experts,), generator=fixed)
    memory = centres[near] + torch.randn(num_experts, _FEATURES, generator=fixed)
    cluster = torch.multinomial(1 / torch.arange(1.0, _CLUSTERS + 1), rows, replacement=True, generator=generator)
    h = centres[cluster] + torch.randn(rows, _FEATURES, generator=generator)
    return (h @ torch.nn.functional.normalize(memory, dim=-1).T).topk(k).indices


def interleaved_rank(experts: Tensor, num_experts: int) -> Tensor:
    """Interleaved bits of the ascending experts, highest bit first (Morton order)."""
    ascending = experts.long().sort(dim=-1).values
    rank = torch.zeros(len(experts), dtype=torch.int64)
    for bit, column in product(reversed(range((num_experts - 1).bit_length())), range(experts.shape[1])):
        rank = 2 * rank + (ascending[:, column] >> bit & 1)
    return rank


def lexicographic_rank(experts: Tensor, num_experts: int) -> Tensor:
    """The ascending experts as digits of a number."""
    powers = num_experts ** torch.arange(experts.shape[1] - 1, -1, -1)
    return (experts.long().sort(dim=-1).values * powers).sum(-1)


ROUTINGS = (uniform, skewed, clustered)
Rank = Callable[[Tensor, int], Tensor]


def mean_union(experts: Tensor, num_experts: int, block_m: int, rank: Rank = set_rank) -> float:
    """Mean number of experts in a tile of ``block_m`` rows ordered by ``rank``."""
    rows = len(experts)
    tiles = -(-rows // block_m)
    ordered = experts[torch.argsort(rank(experts, num_experts), stable=True)].long()
    used = torch.zeros(tiles * num_experts, dtype=torch.bool)
    used[((torch.arange(rows) // block_m * num_experts)[:, None] + ordered).flatten()] = True
    return used.sum().item() / tiles


def total_union(experts: Tensor, num_experts: int, block_m: int, passes: int) -> float:
    """Sum of the mean unions of all passes."""
    return sum(mean_union(experts[:, c], num_experts, block_m) for c in pass_columns(experts.shape[1], passes))


def counted(experts: Tensor, num_experts: int) -> Iterator[dict]:
    """Results of every way of ordering one routing."""
    rows, k = experts.shape
    block_m, chosen = config.tile_rows(rows), config.passes(rows, num_experts, k)
    ascending = experts.sort(dim=-1).values
    for passes in PASSES[k]:
        options = {"block_m": block_m, "order": "revolving", "passes": passes}
        predicted = sum(config.rows_times_union(rows, num_experts, c.stop - c.start) for c in pass_columns(k, passes))
        extra = {"predicted": f"{predicted / rows:.2f}", "chosen": int(passes == chosen)}
        yield {**options, **extra, "columns": "given", "union": total_union(experts, num_experts, block_m, passes)}
        if passes > 1:
            yield {**options, "columns": "ascending", "union": total_union(ascending, num_experts, block_m, passes)}
    whole = {"columns": "given", "passes": 1}
    for name, rank in (("lexicographic", lexicographic_rank), ("interleaved", interleaved_rank)):
        union = mean_union(experts, num_experts, block_m, rank)
        yield {**whole, "block_m": block_m, "order": name, "union": union}
    for height in (64, 32):
        yield {**whole, "block_m": height, "order": "revolving", "union": mean_union(experts, num_experts, height)}


def main(out: Path) -> None:
    """Count, show progress, and write the results."""
    shapes = [s for s in product(ROUTINGS, ROWS, PASSES, EXPERTS) if s[2] < s[3]]
    table = []
    for number, (routing, rows, k, num_experts) in enumerate(shapes, start=1):
        start = time.perf_counter()
        generator = torch.Generator().manual_seed(0)
        sizes = [min(_CHUNK, rows - first) for first in range(0, rows, _CHUNK)]
        experts = torch.cat([routing(size, num_experts, k, generator).int() for size in sizes])
        shape = {"routing": routing.__name__, "rows": rows, "experts": num_experts, "k": k}
        table += [{**shape, **options, "union": f"{options['union']:.2f}"} for options in counted(experts, num_experts)]
        print(f"{number:2}/{len(shapes)} {shape}: {time.perf_counter() - start:.1f} s", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "results" / "unions.csv")
