"""One folder for each operator: schema and checks (op.py), eager reference, kernels, configurations, cost, README."""
