"""One node: the RbM student against an MLP of one expert's width, and against the teacher with its neighbourhood."""

import os
from pathlib import Path

import pytest
import torch

from benchmarks.harness import Results
from rbm.datasets import load_dataset, num_classes
from rbm.metrics import teacher_latency
from rbm.students import MLPStudent, RbMStudent
from rbm.teachers import build_teacher

ROOT = Path(os.environ.get("RBM_DATA_ROOT", "../shared/data"))


def students(in_channels: int, hidden_channels: int, out_channels: int) -> dict[str, torch.nn.Module]:
    """An RbM student and the MLP that each of its experts, alone, would be."""
    sizes = (in_channels, hidden_channels, out_channels)
    return {"rbm": RbMStudent(*sizes, num_experts=8, top_k=3).eval(), "mlp": MLPStudent(*sizes).eval()}


@pytest.mark.parametrize("rows", [1, 2708])
def test_student_of_cora_width(benchmark, compare, results: Results, rows: int):
    models = students(1433, 128, 7)
    x = (torch.rand(rows, 1433) < 0.01).float()
    with torch.inference_mode():
        timings = compare({name: lambda model=model: model(x) for name, model in models.items()})
        benchmark(models["rbm"], x)
    for name, timing in timings.items():
        results.add("student", f"B={rows} 1433-128-7 E=8 k=3", name, "seconds", timing)


def test_one_node_of_amazon_computers(benchmark, compare, results: Results):
    if not (ROOT / "Amazon" / "Computers").exists():
        pytest.skip(f"Amazon-Computers is not in {ROOT}; name its root in RBM_DATA_ROOT")
    graph = load_dataset("computers", root=ROOT)
    features, classes = graph.num_features, num_classes(graph)
    models = students(features, 128, classes)
    teacher = build_teacher("sage", features, classes, hidden_channels=128)
    one = graph.x[:1].contiguous()
    with torch.inference_mode():
        timings = compare({name: lambda model=model: model(one) for name, model in models.items()})
        milliseconds, _ = teacher_latency(teacher, graph, num_layers=2)
        benchmark(models["rbm"], one)
    for name, timing in timings.items():
        results.add("one node", "amazon-computers", name, "seconds", timing)
    results.add("one node", "amazon-computers", "teacher", "seconds", milliseconds / 1e3)
