"""Importing is quick, and brings nothing that only some users need. (A broken librbm_cuda: see test_build.py.)"""

import subprocess
import sys
import time


def seconds(program: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - start


def test_import_time():
    """The issue's bound is 2.5 s in all; what is ours is what comes on top of torch. Other work only ever adds time."""
    seconds("import rbm, rbm_kernels")
    turns = [(seconds("import rbm, rbm_kernels"), seconds("import torch")) for _ in range(4)]
    ours, torch_alone = (min(times) for times in zip(*turns, strict=True))
    assert ours - torch_alone < 0.8


def test_import_brings_no_graph_library():
    needless = {"torch_geometric", "sklearn", "matplotlib", "huggingface_hub"}
    program = f"import sys, rbm, rbm_kernels; assert not {needless} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
