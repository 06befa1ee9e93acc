"""One folder per operator. Its README.md has the mathematics.

- ``op.py``: schema, checks, fake implementation, derivative, and the public function.
- ``reference.py``: the definition in eager PyTorch.
- ``kernels.py``: Triton kernels. ``launch.py``: the functions that launch them. ``config.py`` chooses tiles by shape,
  and ``cost.py`` has minimum bytes and operations, and what PyTorch's ``FlopCounterMode`` counts.

Operators without ``kernels.py`` run in C++ on the CPU, and elsewhere as their reference.

Symbols in shapes: B rows, D features per row, N outputs, E experts, k experts per row. Tensor names: rows ``x [B, D]``
(``h`` for routing and memory), ``memory [E, D]``, ``weight [E, N, D]``, ``bias [E, N]``, ``gates`` and
``experts [B, k]``.

Terms used in every folder:

- *program*: one instance of a launched kernel, run on one multiprocessor; CUDA and ptx_executor call it a block.
- *tile*: the part of a result that a program computes at once, rows by columns or rows by experts.
- *slice*: the part of the summed dimension that is multiplied at once.
- *share*: the rows that one program sums up; the sums of all shares are added afterwards.
- *pass*: one sweep over all rows, for some columns of their experts or for their norms.
- ``BLOCK_M``, ``BLOCK_N``, ...: kernel constants, the sizes of a tile or a slice.
"""
