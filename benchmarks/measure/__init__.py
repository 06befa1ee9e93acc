"""How suites measure: devices, turns, shapes, precisions, and the one schema of results."""
