"""What tests demand of compiled kernels: with another Triton than those that the tiles were chosen with, less.

A stranger's PyTorch brings its own Triton. Triton 3.7.1 spills 8 to 24 bytes in some cases, and one kernel for sm_100
takes so many registers that one program of the two claimed fits. That takes time; results are the same.
"""

from pathlib import Path

from rbm.utils.environment import package_version
from rbm.utils.files import read_csv

_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# Rows of the committed reports of this Triton.
_ROWS = [
    row
    for report in _RESULTS.glob("static_report*.csv")
    for row in read_csv(report)
    if row["triton"] == package_version("triton")
]
CHOSEN_WITH = bool(_ROWS)
# Bytes of registers that a kernel may spill: none with the newest Triton, 8 with 3.6.
MOST_SPILLED = max((int(row["spilled_bytes"]) for row in _ROWS), default=64)
