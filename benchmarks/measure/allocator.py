"""Whether the C library gives freed memory back to the system.

glibc maps large allocations anew and trims its heap, depending on what a process allocated before. A new page costs a
page fault at its first use. How much of a call's time that is depends on the process and on the machine (a virtual
machine's faults are slow), not on the implementation. Allocators such as jemalloc keep the memory.
"""

import ctypes

# What rows of a run with --keep-memory add to their device.
REMARK = ", memory kept"
# Parameters of mallopt(3). No allocation below the first size is mapped, and no heap is trimmed below the second.
_PARAMETERS = {"M_MMAP_THRESHOLD": (-3, 2**30), "M_TRIM_THRESHOLD": (-1, 2**31 - 1)}


def keep_freed_memory() -> None:
    """Let this process reuse its freed memory from now on. The heap grows during the first calls.

    Raises:
        RuntimeError: the C library is not glibc, or refuses.
    """
    c_library = ctypes.CDLL(None)
    if not hasattr(c_library, "gnu_get_libc_version"):
        raise RuntimeError("--keep-memory needs glibc, and this is another C library")
    for name, (parameter, value) in _PARAMETERS.items():
        if not c_library.mallopt(parameter, value):
            raise RuntimeError(f"--keep-memory: glibc refuses {name}={value}")
