"""How many programs of a kernel a multiprocessor holds, by what each resource allows.

The limits are those of the table of compute capabilities in NVIDIA's CUDA programming guide.
"""

from typing import NamedTuple

REGISTERS, THREADS_A_WARP = 65_536, 32
TENSOR_COLUMNS = 512  # of sm_100's tensor memory


class Multiprocessor(NamedTuple):
    """Shared memory in kilobytes, of one program and of all together; the most warps and programs at a time."""

    shared_of_program: int
    shared: int
    warps: int
    programs: int


MULTIPROCESSORS = {
    80: Multiprocessor(163, 164, 64, 32),
    90: Multiprocessor(227, 228, 64, 32),
    100: Multiprocessor(227, 228, 64, 32),
    120: Multiprocessor(99, 100, 48, 24),
}


def programs_by_registers(registers: int, num_warps: int) -> int:
    """Registers are handed out to a warp by eights for each of its threads."""
    return REGISTERS // (-(-registers // 8) * 8 * THREADS_A_WARP * num_warps)


def programs_by_shared(shared_bytes: int, architecture: int) -> int:
    """0 where one program is too large by itself. The system takes one kilobyte of each program's."""
    limits = MULTIPROCESSORS[architecture]
    if shared_bytes > limits.shared_of_program * 1024:
        return 0
    return limits.shared * 1024 // (shared_bytes + 1024)


def programs(registers: int, num_warps: int, shared_bytes: int, tensor_columns: int, architecture: int) -> int:
    """What all limits together allow."""
    limits = MULTIPROCESSORS[architecture]
    return min(
        programs_by_registers(registers, num_warps),
        programs_by_shared(shared_bytes, architecture),
        TENSOR_COLUMNS // tensor_columns if tensor_columns else limits.programs,
        limits.warps // num_warps,
        limits.programs,
    )
