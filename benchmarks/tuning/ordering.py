"""Times the grouped matmul with and without an order of the rows, for tiles of several heights, on this GPU.

``python -m benchmarks.tuning.ordering --out benchmarks/results/gpu_ordering.csv``. Without an order, each tile of rows
meets every expert, and the weight's gradient reads all rows for every expert, which saves the launches of an order and
of lists. ``is_small``, ``sums_all_rows`` and ``tile_rows`` of the configuration choose by shape; the rows written here
are what they choose by. Calls are replayed as CUDA graphs; a forward pass includes making the order, a backward pass
has it already. ``--warm`` only compiles, for one precision and pass per process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated
from unittest import mock

import typer

from benchmarks.measure.device import HERE
from benchmarks.measure.harness import Results, interleave
from benchmarks.measure.precision import multiplying_as
from benchmarks.measure.shapes import Problem, Shape, Workload, batch, width
from rbm_kernels import _launching, expert_order
from rbm_kernels.ops.expert_matmul import config, launch

HEIGHTS = (16, 32, 64, 128)
# Multiples of 16, so that one compilation serves all.
ROWS = (64, 256, 1_024, 2_704, 7_648, 12_992)
SHAPES = [Shape(batch(rows), width(size), width(size)) for size in (256, 64) for rows in ROWS]
PRECISIONS = ("bfloat16", "float32", "tf32")
PASSES = ("forward", "backward input", "backward weight")


@contextmanager
def chosen(height: int, *, ordered: bool) -> Iterator[None]:
    """The configuration with this choice instead of its own."""
    with (
        mock.patch.object(config, "is_small", return_value=not ordered),
        mock.patch.object(config, "sums_all_rows", return_value=not ordered),
        mock.patch.object(config, "tile_rows", return_value=height),
    ):
        _launching.forget_prepared()
        yield
    _launching.forget_prepared()


def variants(p: Problem, shape: Shape, which: str) -> dict[str, tuple[int, bool, Callable[[], object]]]:
    """Calls of one pass by name, each with its height and whether rows are ordered."""
    layer = (p.x.detach(), p.weight.detach(), p.bias.detach(), p.gates.detach(), p.experts)
    ways = {"every expert": False, "ordered": True}
    if which == "backward weight":  # its slices depend on the number of rows alone
        call = partial(launch.backward_weight, p.grad, layer[0], layer[3], layer[4], shape.experts)
        return {name: (config.tile_rows(shape.rows), ordered, call) for name, ordered in ways.items()}
    return {
        f"{name}, tiles of {height}": (height, ordered, _by(p, shape, layer, which, height, ordered))
        for name, ordered in ways.items()
        for height in HEIGHTS
    }


def _by(p: Problem, shape: Shape, layer: tuple, which: str, height: int, ordered: bool) -> Callable[[], object]:
    def make() -> tuple:
        return tuple(expert_order(p.experts, shape.experts, height)) if ordered else ()

    if which == "forward":
        return lambda: launch.expert_matmul(*layer, *make())
    order = make()
    return lambda: launch.backward_input(p.grad, *layer, False, *order)


def main(
    out: Annotated[Path, typer.Option(help="CSV file for the rows.")],
    warm: Annotated[bool, typer.Option(help="Only compile.")] = False,
    precision: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(PRECISIONS),
    passes: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(PASSES),
    seconds: Annotated[float, typer.Option(help="Seconds per comparison.")] = 0.05,
) -> None:
    """Time, or only compile, every variant at every shape."""
    results = Results(out)
    for shape in SHAPES:
        for name in precision.split(","):
            problem = Problem.of(Workload(shape, name))
            for which in passes.split(","):
                with multiplying_as(name):
                    _compare(results, problem, shape, name, which, 0.0 if warm else seconds)


def _compare(results: Results, problem: Problem, shape: Shape, precision: str, which: str, seconds: float) -> None:
    graphs = {}
    for name, (height, ordered, call) in variants(problem, shape, which).items():
        with chosen(height, ordered=ordered):
            call()
            if seconds:
                graphs[name] = HERE.capture([call] * 8)
    for name, timing in (
        interleave({n: g.replay for n, g in graphs.items()}, seconds=seconds).items() if seconds else ()
    ):
        per_call = type(timing)(*(value / 8 for value in (timing.median, timing.p20, timing.p80)))
        results.add("expert_matmul", str(shape), name, f"{which} graph seconds", per_call, dtype=precision)


if __name__ == "__main__":
    typer.run(main)
