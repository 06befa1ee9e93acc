"""One epoch of distillation with neighbours' soft labels: one forward per node compared with one forward per pair.

An epoch is what ``rbm distill`` repeats: a training step and an evaluation. ``pairs`` is the method of the released
code, with our layers, in its batches of 4,096 pairs. On a CPU the profiler shows where our time is spent.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure.device import HERE
from benchmarks.measure.harness import Results, interleave
from benchmarks.measure.pace import Pace
from benchmarks.measure.shapes import DEVICE

ROOT = Path(os.environ.get("RBM_DATA_ROOT", "../shared/data"))
FORWARDS = {"rbm": {"forward": "node"}, "pairs": {"forward": "pair", "batch_size": 4096}}
FOLDERS = {"cora": "Planetoid/Cora", "amazon-photo": "Amazon/Photo"}
# By the names in PyTorch's profiler; the forward part of a derivative has the second name.
SPENT_ON = {
    "the layer's operators": ("rbm::", "GeneratedBackwardFor_rbm"),
    "drawing dropout": ("aten::bernoulli_",),
    "concatenation": ("aten::cat",),
    "Adam": ("aten::_fused_adam_",),
}


def trainers(name: str) -> dict:
    """Two trainers for a graph's student with the hyperparameters of the paper, which differ only in their forwards."""
    from rbm.config.presets import preset_config
    from rbm.datasets import load_dataset
    from rbm.datasets.encodings import Encodings
    from rbm.datasets.splits import split_graph
    from rbm.distillation.methods.rbm import RbMTrainer
    from rbm.nn.students import RbMStudent
    from rbm.teachers.outputs import outputs_from_logits

    graph = load_dataset(name, ROOT).to(DEVICE)
    split = split_graph(graph)
    teacher_outputs = outputs_from_logits(torch.randn(graph.num_nodes, graph.num_classes), split)
    found = {}
    for implementation, forward in FORWARDS.items():
        config = preset_config("clean", name).updated({"distill": forward, "rbm": {"pretrain_epochs": 0}})
        positions = torch.randn(graph.num_nodes, config.encoding.embedding_dim, device=DEVICE)
        width = graph.num_features + positions.shape[1]
        student = RbMStudent.from_config(config.rbm, in_channels=width, out_channels=graph.num_classes)
        trainer = RbMTrainer(student.to(DEVICE), split, teacher_outputs, config, Encodings(positions, positions))
        trainer.model.pretraining = False
        found[implementation] = trainer
    return found


def shares(call: Callable[[], None]) -> dict[str, float]:
    """The shares of a call's operator time by category."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    spent = dict.fromkeys([*SPENT_ON, "everything else"], 0.0)
    for event in profiled.key_averages():
        names = (name for name, starts in SPENT_ON.items() if event.key.startswith(starts))
        spent[next(names, "everything else")] += event.self_cpu_time_total
    return {name: time / sum(spent.values()) for name, time in spent.items()}


@pytest.mark.parametrize("name", ["digits", *FOLDERS])
def test_epoch(results: Results, seconds: float, pace: Pace, benchmark, name: str):
    pytest.importorskip("torch_geometric")
    pytest.importorskip("pydantic")  # needed for presets; may be missing on a borrowed machine
    if name != "digits" and seconds < 0.5:
        pytest.skip("a smoke run is over before one epoch of pairs")
    if name in FOLDERS and not (ROOT / FOLDERS[name]).exists():
        pytest.skip(f"{name} is not in {ROOT}; name its root in RBM_DATA_ROOT")

    def epoch(trainer) -> None:
        trainer.model.train()
        trainer.train_epoch(1)  # not the first epoch, which places memory vectors by K-means
        trainer.model.eval()
        trainer.evaluate()

    calls = {key: lambda trainer=trainer: epoch(trainer) for key, trainer in trainers(name).items()}
    least = 1 if seconds < 0.5 else 2
    timings = interleave(calls, seconds=seconds, least=least, limit=pace.limit(seconds))
    for key, timing in timings.items():
        results.add("distillation epoch", name, key, "seconds", timing)
        if timing.rounds < least:
            results.add("distillation epoch", name, key, "seconds rounds", timing.rounds)
    if not HERE.is_gpu:
        for spent, share in shares(calls["rbm"]).items():
            results.add("distillation epoch", name, "rbm", f"share of {spent}", share)
    benchmark.pedantic(calls["rbm"], rounds=3)
