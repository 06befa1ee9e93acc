"""One folder for each operator: schema and checks (op.py), eager reference, kernels, configurations, cost, README.

Letters of shapes: B rows, D features of a row, N outputs, E experts, k experts that a row uses. Names of tensors: rows
``x [B, D]`` (``h`` for routing and memory), ``memory [E, D]``, ``weight [E, N, D]``, ``bias [E, N]``, ``gates`` and
``experts [B, k]``.

Words for parts of the work, alike in every folder:

- *program*: what a launch has many of, each on one multiprocessor; CUDA's word, and ptx_executor's, is block.
- *tile*: the part of a result that a program computes at once, of rows by columns or by experts.
- *slice*: the part of the dimension summed over that is multiplied at once.
- *share*: the rows whose sums one program forms, later added to those of others.
- *pass*: one walk over all rows, for some columns of their experts or for their lengths.
- ``BLOCK_M`` and its like, constants of a kernel: sides of a tile or of a slice.
"""
