"""Reports and measurements; not installed. Run them from the repository: ``python -m benchmarks.NAME``."""
