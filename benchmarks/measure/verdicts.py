"""Verdicts: which operators passed their tests on this machine. ``gpu.sh`` passes them to the suites that it runs.

``RBM_VERDICTS`` has them, as in ``expert_matmul=passed;layer=failed``. Without it, suites write :data:`NOT_TESTED`.
"""

import os
from collections.abc import Mapping

# ``core``: the core tests passed, the other tests are not complete.
PASSED, CORE, FAILED, NOT_TESTED = "passed", "core", "failed", "not tested"
VARIABLE = "RBM_VERDICTS"

# Suites, and operators in their rows, whose tests have another name. A name that ends in a blank stands for all names
# that start with it.
_TESTED_AS = {
    "ffn": "feed_forward",
    "cold_start": "layer",
    "memory_statistics": "memory_update",
    "memory_update_": "memory_update",
    "student": "students",
    "student, ": "students",
    "one node ": "students",
    "distillation epoch": "students",
    "distillation_epoch": "students",
}
# Rows that belong to no operator, but to the machine or the run itself.
_OF_NO_OPERATOR = ("build", "ceiling", "correctness", "smoke", "suite")


def tested_as(operator: str) -> str:
    """The operator whose tests validate a suite or a row's operator; empty for rows that belong to no operator."""
    if operator in _OF_NO_OPERATOR:
        return ""
    for name, tested in _TESTED_AS.items():
        if operator == name or (name.endswith(" ") and operator.startswith(name)):
            return tested
    return operator


def verdict_of(operator: str, verdicts: Mapping[str, str] | None = None) -> str:
    """The verdict on a row's operator, from ``verdicts`` or the environment; empty for rows without an operator."""
    tested = tested_as(operator)
    if not tested:
        return ""
    return (from_environment() if verdicts is None else verdicts).get(tested, NOT_TESTED)


def from_environment() -> dict[str, str]:
    """The verdicts passed to this process, by operator."""
    pairs = os.environ.get(VARIABLE, "")
    return dict(pair.split("=", 1) for pair in pairs.split(";") if pair)


def to_environment(verdicts: Mapping[str, str]) -> dict[str, str]:
    """The environment variable that passes them on."""
    return {VARIABLE: ";".join(f"{operator}={verdict}" for operator, verdict in verdicts.items())}
