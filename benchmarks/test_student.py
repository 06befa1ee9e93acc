"""One node: the RbM student against an MLP of one expert's width, and against the teacher with its neighbourhood."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.measure.harness import Results
from benchmarks.measure.shapes import DEVICE, Shape, Workload
from rbm.nn.students import MLPStudent, RbMStudent

ROOT = Path(os.environ.get("RBM_DATA_ROOT", "../shared/data"))
CORA = Workload(Shape(1, 1_433, 7), "float32")


def students(in_channels: int, hidden_channels: int, out_channels: int) -> dict[str, torch.nn.Module]:
    """An RbM student and the MLP that each of its experts, alone, would be."""
    sizes = (in_channels, hidden_channels, out_channels)
    models = {"rbm": RbMStudent(*sizes, num_experts=8, top_k=3), "mlp": MLPStudent(*sizes)}
    return {name: model.to(DEVICE).eval() for name, model in models.items()}


def answer(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


@pytest.mark.parametrize("rows", [1, 2708])
def test_student_of_cora_width(suite, rows: int):
    run = suite("student, 128 hidden", replace(CORA, shape=replace(CORA.shape, rows=rows)))
    x = (torch.rand(rows, 1433) < 0.01).float().to(DEVICE)
    # Made before: what inference mode makes has no versions, and a layer keeps nothing of it.
    models = students(1433, 128, 7)
    with torch.inference_mode():
        run.time("forward", models, answer, [x])


def test_one_node_of_amazon_computers(suite, results: Results):
    pytest.importorskip("torch_geometric")
    if not (ROOT / "Amazon" / "Computers").exists():
        pytest.skip(f"Amazon-Computers is not in {ROOT}; name its root in RBM_DATA_ROOT")
    from rbm.datasets import load_dataset, num_classes
    from rbm.distillation.latency import teacher_latency
    from rbm.teachers import build_teacher

    graph = load_dataset("computers", root=ROOT).to(DEVICE)
    features, classes = graph.num_features, num_classes(graph)
    run = suite("one node of amazon-computers, 128 hidden", Workload(Shape(1, features, classes), "float32"))
    models = students(features, 128, classes)
    teacher = build_teacher("sage", features, classes, hidden_channels=128).to(DEVICE)
    with torch.inference_mode():
        run.time("forward", models, answer, [graph.x[:1].contiguous()])
        milliseconds, _ = teacher_latency(teacher, graph, num_layers=2)
    results.add(run.operator, str(run.workload.shape), "teacher", "forward seconds", milliseconds / 1e3)
