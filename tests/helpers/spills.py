"""How many bytes of registers compiled kernels may spill."""

from importlib.metadata import version

# Those of the committed reports, benchmarks/results/static_report*.csv.
KNOWN_TRITONS = ("3.6.0", "3.9.0")


def most_spilled() -> int:
    """0 bytes with the Tritons that the tiles were chosen with. With others, a few registers, which takes time alone:
    Triton 3.7.1 spills 8 to 24 bytes in 5 of 52 cases.
    """
    return 0 if version("triton") in KNOWN_TRITONS else 64
