"""Measurement in suites: devices, alternating variants, shapes, precisions, and the common schema of results."""
