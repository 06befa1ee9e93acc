#!/usr/bin/env bash
# Everything that a GPU can tell, in one command: builds, tests, measures, sums up.
#
#   bash benchmarks/gpu.sh OUT_DIR [options]        --help says which; benchmarks/gpu/ does it
#
# For a bare machine with PyTorch, Triton, nvcc, ninja, cmake and pytest, and no network. PYTHON names its
# Python, RBM_COMMIT the commit of a tree that has no .git. --rehearse needs no GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
