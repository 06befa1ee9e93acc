#!/usr/bin/env bash
# Builds, tests, measures and summarises on a GPU, in one command.
#
#   bash benchmarks/gpu.sh OUT_DIR [options]        see --help and benchmarks/gpu/
#
# For a bare machine with PyTorch, Triton, nvcc, ninja, cmake and pytest, and no network. PYTHON is the Python to use,
# RBM_COMMIT the commit of a tree without .git. --rehearse needs no GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
