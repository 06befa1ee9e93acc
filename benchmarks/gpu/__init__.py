"""``gpu.sh``: builds, tests and measures on a GPU within a time budget, and continues an earlier call."""
