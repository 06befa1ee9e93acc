"""What tests demand of compiled kernels: with another Triton than those that the tiles were chosen with, less.

A stranger's PyTorch brings its own Triton. Triton 3.7.1 spills 8 to 24 bytes in some cases, and one kernel for sm_100
takes so many registers that one program of the two claimed fits. That takes time; results are the same.
"""

from rbm.utils.environment import package_version

# Those of the committed reports, benchmarks/results/static_report*.csv.
CHOSEN_WITH = package_version("triton") in ("3.6.0", "3.9.0")


def most_spilled() -> int:
    """The most bytes of registers that a kernel may spill."""
    return 0 if CHOSEN_WITH else 64
