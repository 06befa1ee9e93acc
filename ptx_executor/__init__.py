"""Runs compiled GPU kernels on the CPU and watches them: PTX, block by block, on the tensors' own memory.

- :mod:`ptx_executor.parse`: PTX text -> statements.
- :mod:`ptx_executor.program`: statements -> a program that can be launched; the errors of the watchers.
- :mod:`ptx_executor.gpu`: Triton's launches, executed.
- :mod:`ptx_executor.watched_memory`: which bytes of PyTorch's tensors have been written.
- ``core/``: the machine, in C++: memories with their watchers, the scheduler, ``instructions/`` with one definition
  for each.

The page docs/ptx_executor.md says what it proves and what it does not.
"""

# What a watcher may say: :attr:`ptx_executor.program.WatcherError.kind`.
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
