"""Runs compiled GPU kernels on the CPU and checks them: executes PTX, block by block, on the tensors' own memory.

- :mod:`ptx_executor.parse`: PTX text -> statements.
- :mod:`ptx_executor.program`: statements -> a program that can be launched; the errors of the watchers.
- :mod:`ptx_executor.gpu`: executes Triton's launches.
- :mod:`ptx_executor.watched_memory`: tracks which bytes of PyTorch's tensors have been written.
- ``core/``: the machine, in C++: memories with their watchers, the scheduler, and ``instructions/``, where each
  instruction is defined once.

docs/ptx_executor.md explains what it proves and what it does not.
"""

# The possible values of :attr:`ptx_executor.program.WatcherError.kind`.
KINDS = (
    "out of bounds",
    "misaligned",
    "unwritten",
    "race between blocks",
    "race between warps",
    "race between lanes",
    "copy not waited for",
    "wgmma not waited for",
    "wgmma fence",
    "proxy fence",
    "descriptor",
    "barrier",
    "divergence",
    "endless",
)
