"""The medians of a file of results, with look-up and formatting for tables."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.measure.allocator import REMARK
from benchmarks.measure.shapes import Shape
from benchmarks.report.reading import read

ROOT = Path(__file__).resolve().parents[2]
RESULTS, RUNS = ROOT / "benchmarks" / "results", ROOT / "results"
CPU, GPU = RESULTS / "cpu.csv", RESULTS / "gpu.csv"
# The layer on a CPU, as PyTorch allocates memory and with --keep-memory.
LAYER = RESULTS / "cpu_layer.csv"
LAYER_AVX2 = RESULTS / "cpu_layer_avx2.csv"  # on a processor without AVX-512
AMX = RESULTS / "cpu_amx.csv"  # the layer, the experts and the feed-forward layer on a processor with AMX


class Figures:
    """The medians of one file, with look-up by what they describe.

    Args:
        path: the file; without it, there are no figures.
        ending: only rows whose device ends like this.
    """

    def __init__(self, path: Path, ending: str = "") -> None:
        medians = read([path]) if path.exists() else {}
        self.medians = {key: value for key, value in medians.items() if key.device.endswith(ending)}
        self._known = {key[:-1]: value for key, value in self.medians.items()}

    def of(
        self, operator: str, shape: Shape | str, name: str, metric: str, dtype: str, routing: str = "uniform"
    ) -> float | None:
        return self._known.get((operator, str(shape), dtype, routing, name, metric))

    def cells(self, names: Sequence[str], *about: str | Shape, dtype: str, routing: str = "uniform") -> list[str]:
        """Seconds of ours, then the ratio of each of ``names`` to it.

        Uses times of CUDA graphs if both sides have them; ``about`` is operator, shape and metric without its unit.
        """
        operator, shape, metric = about

        def both(name: str) -> tuple[float, float] | None:
            for unit in ("graph seconds", "seconds"):
                pair = [self.of(operator, shape, n, f"{metric} {unit}", dtype, routing) for n in ("rbm", name)]
                if None not in pair:
                    return pair[0], pair[1]
            return None

        ours = both("rbm")
        ratios = [f"{significant(pair[1] / pair[0])} x" if (pair := both(name)) else "" for name in names]
        return [human(ours[0]) if ours else "", *ratios]


def layer_figures(*, memory_kept: bool, path: Path | None = None) -> Figures:
    """Figures of the layer on a CPU, with freed memory kept (:mod:`benchmarks.measure.allocator`) or not."""
    return Figures(path or LAYER, f"threads{REMARK}" if memory_kept else "threads")


def significant(value: float) -> str:
    """Two significant digits, three from 100 on."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"


def human(seconds: float) -> str:
    """Seconds in a readable unit."""
    units = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))
    unit, name = next((unit for unit in units if seconds >= 0.0995 * unit[0]), units[-1])
    return f"{significant(seconds / unit)} {name}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table whose first ``words`` columns are words and whose other columns are numbers."""
    lines = [header, ["---"] * words + ["---:"] * (len(header) - words), *rows]
    return "".join(f"| {' | '.join(line)} |\n" if line[0] != "---" else f"|{'|'.join(line)}|\n" for line in lines)
