"""Runs compiled GPU kernels on the CPU and watches them: PTX, block by block, on the tensors' own memory."""
