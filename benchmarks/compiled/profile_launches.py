"""Launches every kernel once at the reference shape, for a profiler that the program itself starts and stops.

``ncu --profile-from-start off python -m benchmarks.compiled.profile_launches``; ``--dry-run`` lists what would be
launched.
"""

import sys

from benchmarks.compiled.cases import CASES, Case, Tensors, at_hand, labels, launches
from benchmarks.measure.device import HERE
from benchmarks.measure.precision import multiplying_as
from rbm_kernels import memory_statistics, memory_update_

PROFILED = [case for case in CASES if case == Case(case.operator, case.precision) or case.rows == 1]


def main(*, dry_run: bool) -> None:
    for case in PROFILED:
        if dry_run:
            print(f"{case.operator} {case.precision} {case}: {'; '.join(labels(case))}")
            continue
        with multiplying_as(case.precision):
            for launch in launches(at_hand(case), Tensors.of(at_hand(case), HERE.name)).values():
                profiled(launch)
    if not dry_run:
        t = Tensors.of(at_hand(Case("memory_statistics", "bfloat16")), HERE.name)
        sums = memory_statistics(t.x, t.gates, t.experts, t.memory.shape[0])
        profiled(lambda: memory_statistics(t.x, t.gates, t.experts, t.memory.shape[0]))
        profiled(lambda: memory_update_(t.memory, *sums, 0.9))


def profiled(launch) -> None:
    launch()  # compiles, outside of the profile
    HERE.profiled(launch)


if __name__ == "__main__":
    main(dry_run="--dry-run" in sys.argv[1:])
