"""What is read from compiled code, without a GPU: registers, shared memory, instructions."""
