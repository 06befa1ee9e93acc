"""Reports on the kernels' compiled code, without a GPU: registers, shared memory, instructions."""
