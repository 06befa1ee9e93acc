"""The state of a run: results, verdicts and finished workloads, all stored as rows of ``results.csv``.

In addition to figures it has rows ``suite`` (a workload of a suite was measured completely), ``correctness`` (how many
tests of an operator passed or failed) and ``smoke`` (whether a case of the smoke test passed). So the file alone is
enough to continue the run later.
"""

import csv
import os
from collections.abc import Iterable
from pathlib import Path

from benchmarks.measure.harness import COLUMNS, Results, machine
from benchmarks.measure.verdicts import CORE, FAILED, NOT_TESTED, PASSED, verdict_of

# The column `shape` has the operator of the tests, `implementation` the part.
TESTS, WORKLOAD, SMOKE = "correctness", "suite", "smoke"
PARTS = ("core", "rest")


class State:
    """Reads and marks the results of this run. Suites append to the same file while they run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> list[dict[str, str]]:
        """All rows, without a last row that was cut off when a process was killed."""
        if not self.path.exists():
            return []
        whole, end, _ = self.path.read_text(encoding="utf-8").rpartition("\n")
        return list(csv.DictReader(f"{whole}{end}".splitlines()))

    def carry(self, earlier: Path) -> tuple[int, int]:
        """Copy the rows of an earlier run; return how many, and how many were skipped (other commit or machine).

        Raises:
            ValueError: the commit is unknown, so that no row is known to belong to it; or rows of another commit would
                be lost from the results of this run.
        """
        here = machine()
        if not here["commit"]:
            raise ValueError(
                f"{earlier} cannot be taken up without knowing the commit: this tree has no .git, name it in RBM_COMMIT"
            )
        known = ("commit", "device", "torch")
        found = State(earlier).rows()
        same = [row for row in found if all(row[name] == here[name] for name in known)]
        if earlier != self.path:
            self._write([*self.rows(), *same])
        elif len(same) < len(found):
            raise ValueError(f"{earlier} has rows of another commit, device or torch: name another OUT_DIR, or move it")
        return len(same), len(found) - len(same)

    def add_tests(self, operator: str, part: str, outcomes: Iterable[str]) -> None:
        """Record that a part of an operator's tests is complete: how many passed, and how many failed."""
        outcomes = list(outcomes)
        for outcome in ("passed", "failed"):
            count = outcomes.count(outcome)
            Results(self.path).add(TESTS, operator, part, f"tests {outcome}", count, dtype="", routing="")

    def tested(self, operator: str, part: str) -> bool:
        """Whether a part of an operator's tests is complete."""
        return part in self._tests().get(operator, {})

    def add_smoke(self, case: str, verdict: str, seconds: float) -> None:
        """Record the result of a case of the smoke test: ``passed`` or ``failed``."""
        Results(self.path).add(SMOKE, case, verdict, "seconds of the process", seconds, dtype="", routing="")

    def smoked(self, case: str) -> bool:
        """Whether a case of the smoke test passed."""
        return any(
            (row["operator"], row["shape"], row["implementation"]) == (SMOKE, case, "passed") for row in self.rows()
        )

    def verdicts(self) -> dict[str, str]:
        """For every operator with tests, whether it passed them."""
        found = {}
        for operator, parts in self._tests().items():
            if any(counts.get("tests failed") for counts in parts.values()):
                found[operator] = FAILED
            elif not any(counts.get("tests passed") for counts in parts.values()):
                found[operator] = NOT_TESTED  # all tests were skipped
            else:
                found[operator] = PASSED if parts.keys() >= {*PARTS} else CORE
        return found

    def counts(self) -> tuple[int, int]:
        """How many tests passed and how many failed."""
        all_counts = [counts for parts in self._tests().values() for counts in parts.values()]
        passed, failed = (sum(int(c.get(f"tests {name}", 0)) for c in all_counts) for name in ("passed", "failed"))
        return passed, failed

    def mark(self) -> None:
        """Write the current verdict of its operator into every row."""
        verdicts = self.verdicts()
        rows = self.rows()
        for row in rows:
            row["verified"] = verdict_of(row["operator"], verdicts)
        if rows:
            self._write(rows)

    def _tests(self) -> dict[str, dict[str, dict[str, float]]]:
        found: dict[str, dict[str, dict[str, float]]] = {}
        for row in self.rows():
            if row["operator"] == TESTS:
                counts = found.setdefault(row["shape"], {}).setdefault(row["implementation"], {})
                counts[row["metric"]] = float(row["median"])
        return found

    def _write(self, rows: list[dict[str, str]]) -> None:
        """Replace the file atomically: if the process is killed, the old or the new file remains."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A hidden file, so that it does not count as one of the eight if a killed process leaves it.
        new = self.path.with_name(f".{self.path.name}.new")
        with new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", extrasaction="ignore", restval="")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(new, self.path)
