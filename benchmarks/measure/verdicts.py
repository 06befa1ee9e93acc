"""Verdicts: which operators have passed their tests on this machine, passed by ``gpu.sh`` to the suites that it runs.

``RBM_VERDICTS`` holds it, as ``expert_matmul=passed;layer=failed``. Suites that nobody told write :data:`NOT_TESTED`.
"""

import os
from collections.abc import Mapping

# ``core``: the core tests passed, the others have not been run to their end.
PASSED, CORE, FAILED, NOT_TESTED = "passed", "core", "failed", "not tested"
VARIABLE = "RBM_VERDICTS"

# Operators of rows whose tests have another name. A name that ends in a blank stands for all that begin with it.
_TESTED_AS = {
    "memory_statistics": "memory_update",
    "memory_update_": "memory_update",
    "student": "students",
    "student, ": "students",
    "one node ": "students",
    "distillation epoch": "students",
}
# Rows that are of no operator: the machine, the run itself.
_OF_NO_OPERATOR = ("build", "ceiling", "correctness", "smoke", "suite")


def tested_as(operator: str) -> str:
    """The operator whose tests speak for a row's; none for rows that are of no operator."""
    if operator in _OF_NO_OPERATOR:
        return ""
    for name, tested in _TESTED_AS.items():
        if operator == name or (name.endswith(" ") and operator.startswith(name)):
            return tested
    return operator


def verdict_of(operator: str, verdicts: Mapping[str, str] | None = None) -> str:
    """What is known of a row's operator, from ``verdicts`` or else the environment; nothing where there is none."""
    tested = tested_as(operator)
    if not tested:
        return ""
    return (from_environment() if verdicts is None else verdicts).get(tested, NOT_TESTED)


def from_environment() -> dict[str, str]:
    """The verdicts that this process was told, by operator."""
    told = os.environ.get(VARIABLE, "")
    return dict(pair.split("=", 1) for pair in told.split(";") if pair)


def to_environment(verdicts: Mapping[str, str]) -> dict[str, str]:
    """The variable that tells them."""
    return {VARIABLE: ";".join(f"{operator}={verdict}" for operator, verdict in verdicts.items())}
