"""Checks whether anything became slower: ``python -m benchmarks.report.regression OLD.csv NEW.csv [--limit 1.10]``.

Compares times that both files have, of the same implementation on the same device. The status is 1 if a ratio is above
the limit, and 2 if the files have no time in common.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.report.reading import Key, read


def ratios(old: dict[Key, float], new: dict[Key, float]) -> dict[Key, float]:
    """New over old for every time in both, the largest first."""
    both = {key: new[key] / old[key] for key in old if key in new and key.metric.endswith("seconds") and old[key] > 0}
    return dict(sorted(both.items(), key=lambda item: -item[1]))


def main(
    old: Annotated[Path, typer.Argument(help="Earlier results.", exists=True, dir_okay=False)],
    new: Annotated[Path, typer.Argument(help="New results.", exists=True, dir_okay=False)],
    limit: Annotated[float, typer.Option(help="Maximum ratio of new to old.")] = 1.10,
    implementation: Annotated[str | None, typer.Option(help="Only this one, such as rbm.")] = None,
) -> None:
    """Compare two files of results by ratio."""
    before, after = read([old]), read([new])
    compared = ratios(before, after)
    if implementation:
        compared = {key: ratio for key, ratio in compared.items() if key.implementation == implementation}
    if not compared:
        typer.echo(f"{old} and {new} have no time of the same workload, implementation and device in common", err=True)
        raise typer.Exit(2)
    table = Table("operator", "shape", "dtype", "routing", "implementation", "metric", "old", "new", "ratio")
    for key, ratio in compared.items():
        times = (f"{before[key]:.4g}", f"{after[key]:.4g}", f"{ratio:.2f}")
        table.add_row(*key[:-1], *times, style="red" if ratio > limit else "green" if ratio < 1 / limit else None)
    Console(width=None if Console().is_terminal else 220).print(table)
    slower = sum(ratio > limit for ratio in compared.values())
    typer.echo(f"{len(compared)} times compared, {slower} slower by more than {limit:g}")
    raise typer.Exit(1 if slower else 0)


if __name__ == "__main__":
    typer.run(main)
