"""``gpu.sh``: builds, tests and measures on a GPU within a budget of time, and continues an earlier call."""
