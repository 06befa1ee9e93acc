"""One node: the RbM student compared with an MLP of one expert's width, and with the teacher and its neighbourhood."""

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
    """An RbM student, and the MLP that a single one of its experts would be."""
    sizes = (in_channels, hidden_channels, out_channels)
    models = {"rbm": RbMStudent(*sizes, num_experts=8, top_k=3), "mlp": MLPStudent(*sizes)}
    return {name: model.to(DEVICE).eval() for name, model in models.items()}


def answer(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


@pytest.mark.parametrize("rows", [1, 2708])
def test_student_of_cora_width(suite, rows: int):
    run = suite("student, 128 hidden", replace(CORA, shape=replace(CORA.shape, rows=rows)))
    x = (torch.rand(rows, 1433) < 0.01).float().to(DEVICE)
    # Created outside inference mode: its tensors have no version counter, and a layer caches nothing for them.
    models = students(1433, 128, 7)
    with torch.inference_mode():
        run.time("forward", models, answer, [x])


@pytest.mark.parametrize("setting", ["inductive", "transductive"])
def test_one_node_of_amazon_computers(suite, results: Results, setting: str):
    """The models whose accuracy is in the README: sizes of the preset ``clean``, inputs with their encodings."""
    pytest.importorskip("torch_geometric")
    pytest.importorskip("pydantic")  # needed for presets; may be missing on a borrowed machine
    if not (ROOT / "Amazon" / "Computers").exists():
        pytest.skip(f"Amazon-Computers is not in {ROOT}; name its root in RBM_DATA_ROOT")
    from rbm.config.presets import preset_config
    from rbm.datasets import load_dataset, num_classes
    from rbm.distillation.latency import teacher_latency
    from rbm.distillation.methods.mlp import shaped_like_rbm
    from rbm.teachers import build_teacher

    graph = load_dataset("computers", root=ROOT).to(DEVICE)
    features, classes = graph.num_features, num_classes(graph)
    config = preset_config("clean", "amazon-computers", setting)
    assert config.encoding.deepwalk, "beside the features a row has coordinates from random walks, and nothing else"
    assert not config.encoding.label_propagation
    width, rbm, teacher = features + config.encoding.embedding_dim, config.rbm, config.teacher
    sizes = {"in_channels": width, "hidden_channels": rbm.hidden_channels, "out_channels": classes}
    models = {
        "rbm": RbMStudent.from_config(rbm, **sizes),
        "mlp": MLPStudent.from_config(shaped_like_rbm(config), **sizes),
    }
    models = {name: model.to(DEVICE).eval() for name, model in models.items()}
    shape = Shape(1, width, classes, rbm.num_experts, rbm.top_k)
    run = suite(f"one node of amazon-computers, {setting}", Workload(shape, "float32"))
    shaped = {name: getattr(teacher, name) for name in ("hidden_channels", "num_layers", "norm")}
    graph_network = build_teacher(teacher.name, features, classes, **shaped).to(DEVICE)
    encodings = torch.randn(1, width - features, device=DEVICE)
    with torch.inference_mode():
        run.time("forward", models, answer, [torch.cat([graph.x[:1], encodings], dim=1)])
        milliseconds, _ = teacher_latency(graph_network, graph, num_layers=teacher.num_layers)
    results.add(run.operator, str(run.workload.shape), "teacher", "forward seconds", milliseconds / 1e3)
