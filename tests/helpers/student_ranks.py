"""The work of one process in tests of distributed distillation. Spawned processes import it: it is no test module."""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch_geometric.data import Data

import rbm
from rbm import FusedRbMLayer
from rbm.config import Config
from rbm.datasets.splits import split_graph
from rbm.distillation.methods.moe import MoETrainer
from rbm.distillation.methods.rbm import RbMTrainer
from rbm.distillation.trainer import StudentTrainer
from rbm.nn.moe import MoEStudent
from rbm.nn.students import MLPStudent, RbMStudent
from rbm.teachers.outputs import TeacherOutputs
from rbm.training import loop as training
from rbm.utils.distributed import joined, local_slice, world_size

NODES, FEATURES, CLASSES = 25, 12, 3

# Students have no dropout or noise, which each rank draws separately.
COMMON = {
    "distill": {"label_weight": 0.3, "temperature": 0.8},
    "reliability": {"update_start_epoch": 0, "power_momentum": 0.5},
    "rbm": {"hidden_channels": 8, "num_experts": 4, "top_k": 2, "dropout": 0.0, "norm": "batch", "pretrain_epochs": 1},
    "mlp": {"hidden_channels": 8, "dropout": 0.0, "norm": "batch"},
    "moe": {"hidden_channels": 8, "num_experts": 4, "top_k": 2, "dropout": 0.0, "noise": 0.0, "pretrain_epochs": 1},
}
# Student, its section ``distill``, and epochs: of 25 nodes three batches of 9, 9 and 7, or thirteen of 2 and 1.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "full batch": ("rbm", {}, 20),
    "unequal batches": ("rbm", {"batch_size": 9, "step_per_batch": True}, 7),
    "empty ranks": ("rbm", {"batch_size": 2, "step_per_batch": True}, 2),
    "accumulation": ("rbm", {"batch_size": 9}, 6),
    "a forward a pair": (
        "rbm",
        {"forward": "pair", "batch_size": 50, "mean": "pairs", "draw": "sample", "reduction": "sum_of_batch_means"},
        6,
    ),
    "similarity": ("mlp", {"batch_size": 9, "similarity_weight": 0.5}, 6),
    "learned router": ("moe", {"batch_size": 9, "step_per_batch": True}, 7),
}


# Additional cases for a third rank: parts of unequal size, and empty ones.
CASES_OF_THREE = ("unequal batches", "empty ranks", "similarity")


@dataclass
class Outcome:
    """The result of a training: losses and accuracies by epoch, and the whole state."""

    losses: list[float]
    accuracies: list[tuple[float, ...]]
    state: dict[str, Tensor]


class FixedOutputs(TeacherOutputs):
    """Soft labels without a teacher, some more reliable than others."""

    def entropy_change(self, config, seed: int) -> Tensor:
        return torch.rand(len(self.soft_labels), generator=torch.Generator().manual_seed(5)).double()

    def embedding(self, asked_by: str) -> Tensor:
        return torch.randn(len(self.soft_labels), 8, generator=torch.Generator().manual_seed(6)).double()


def graph() -> Data:
    """Three noisy classes, in float32."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(NODES) % CLASSES
    x = torch.randn(NODES, FEATURES, generator=generator) + 2.0 * F.one_hot(labels, FEATURES)
    edges = torch.randint(0, NODES, (2, 50), generator=generator)
    place = torch.arange(NODES)
    masks = {"train_mask": place < 8, "val_mask": (place >= 8) & (place < 16), "test_mask": place >= 16}
    return Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], dim=1), y=labels, **masks)


def trainer(case: str) -> StudentTrainer:
    """The training of a case, in float64; the same in every process."""
    kind, distill, _ = CASES[case]
    config = Config().updated(COMMON).updated({"distill": distill})
    data = graph()
    data.x = data.x.double()
    split = split_graph(data)
    torch.manual_seed(3)
    logits = torch.randn(NODES, CLASSES).double()
    teacher_outputs = FixedOutputs(logits, logits, {})
    sizes = {"in_channels": FEATURES, "out_channels": CLASSES}
    if kind == "rbm":
        made = RbMTrainer(RbMStudent.from_config(config.rbm, **sizes).double(), split, teacher_outputs, config)
    elif kind == "moe":
        shape = {name: getattr(config.rbm, name) for name in ("hidden_channels", "num_experts", "top_k")}
        student = MoEStudent(FEATURES, out_channels=CLASSES, norm="batch", noise=0.0, **shape).double()
        made = MoETrainer(student, split, teacher_outputs, config, None)
    else:
        made = StudentTrainer(MLPStudent(FEATURES, 8, CLASSES, norm="batch").double(), split, teacher_outputs, config)
    if made.projection is not None:
        made.projection.double()
    return made


def train(trainer: StudentTrainer, epochs: int) -> Outcome:
    torch.manual_seed(4)
    losses, accuracies = [], []
    for epoch in range(epochs):
        trainer.model.train()
        losses.append(trainer.train_epoch(epoch))
        trainer.model.eval()
        accuracies.append(tuple(trainer.evaluate()))
    state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    if trainer.projection is not None:
        state |= {f"projection.{name}": value.clone() for name, value in trainer.projection.state_dict().items()}
    return Outcome(losses, accuracies, state)


def run_cases(start: Callable[[], None], cases: Iterable[str] = CASES) -> dict[str, Outcome]:
    """Run cases with layers that were made before the process group."""
    trainers = {case: trainer(case) for case in cases}
    start()
    return {case: train(made, CASES[case][2]) for case, made in trainers.items()}


def run_all(start: Callable[[], None], folder: Path) -> dict[str, Any]:
    """The cases, then whole runs, then layers under FSDP2."""
    return {
        "cases": run_cases(start),
        "run": run_distillations(folder),
        "sharded": train_layer(fully_shard),
        "reset": [reset_experts(shard_each), reset_experts(fully_shard)],
    }


def shard_each(model: nn.Sequential) -> None:
    """FSDP2 for each module and for the whole, as its documentation recommends."""
    for module in model:
        fully_shard(module)
    fully_shard(model)


def reset_experts(wrap: Callable[[nn.Sequential], Any]) -> dict[str, Any]:
    """State of a model after its dead experts were reset, and which these were."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(6, 6), FusedRbMLayer(6, 4, 5, 1), rbm.RbMFeedForward(4, 8, 5, 1))
    for layer in model[1:]:
        layer.memory[1:] = -layer.memory[0] + 1e-3 * torch.randn_like(layer.memory[1:])
        layer.memory[4] = layer.memory[0]
    wrap(model)
    found = rbm.reset_dead_experts(model, torch.randn(200, 6))
    state = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.state_dict().items()}
    return {**state, "found": found}


def train_layer(wrap: Callable[[FusedRbMLayer], Any]) -> dict[str, Tensor]:
    """State of a layer after three steps, and its outputs with cached folded experts after each step."""
    torch.manual_seed(8)
    layer = FusedRbMLayer(6, 4, 5, 2, dtype=torch.float64)
    wrap(layer)
    optimizer, answers = torch.optim.Adam(layer.parameters(), lr=0.1), []
    for size in (12, 7, 1):
        rows = torch.randn(size, 6, dtype=torch.float64)
        layer.train()
        # The mean over ranks of these is the mean over all rows.
        mine = rows[local_slice(size)]
        (layer(mine).square().sum() * world_size() / size).backward()
        optimizer.step()
        optimizer.zero_grad()
        layer.eval()
        with torch.no_grad():
            answers += [layer(torch.ones(3, 6, dtype=torch.float64)) for _ in range(2)]
    state = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in layer.state_dict().items()}
    return {**state, "answers": torch.stack(answers)}


def run_distillations(folder: Path) -> dict[str, Any]:
    """Complete runs with dropout: one without interruption, one stopped and resumed, and one that is refused."""
    quick = {"max_epochs": 6, "dropout": 0.3}
    changes = dict.fromkeys(("teacher", "mlp", "glnn"), quick)
    changes |= {"rbm": {**quick, "pretrain_epochs": 2}, "glnn": {**quick, "batch_size": 8}}
    options = {
        "teacher": "sage",
        "methods": ("glnn", "mlp", "rbm"),
        "keep": "rbm",
        "config": Config().updated(COMMON).updated(changes),
        "measure_latency": False,
    }
    whole = rbm.distill(graph(), **options, folder=folder / "whole", cache=folder / "cache")
    found = {"summary": whole.summary, "state": whole.student.state_dict()}

    train_epoch, training.CHECKPOINT_SECONDS = RbMTrainer.train_epoch, 0.0
    RbMTrainer.train_epoch = _stopping_at_epoch_5
    with pytest.raises(KeyboardInterrupt):
        rbm.distill(graph(), **options, folder=folder / "stopped")
    RbMTrainer.train_epoch = train_epoch
    resumed = rbm.distill(graph(), **options, folder=folder / "stopped", resume=True)
    found["resumed summary"], found["resumed state"] = resumed.summary, resumed.student.state_dict()

    with pytest.raises(FileExistsError, match="use --resume to continue") as refusal:
        rbm.distill(graph(), **options, folder=folder / "whole")
    found["reported by rank 0"] = getattr(refusal.value, "reported_by_rank0", False)
    return found


def _stopping_at_epoch_5(self: StudentTrainer, epoch: int) -> float:
    if epoch == 5:
        raise KeyboardInterrupt
    return StudentTrainer.train_epoch(self, epoch)


def spawn(ranks: int, target: Callable, folder: Path, *arguments, seconds: float = 120.0) -> list[Any]:
    """What ``target(start, *arguments)`` returns in each of several gloo processes, by rank.

    ``start()`` starts the process group. Processes that take longer than ``seconds`` are stuck, which is an error.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _import_once()
    about = (ranks, port, target, folder, arguments)
    work = mp.start_processes(_run, about, nprocs=ranks, join=False, start_method="forkserver")
    try:
        deadline = time.monotonic() + seconds
        while not work.join(timeout=max(0.1, deadline - time.monotonic())):
            assert time.monotonic() < deadline, f"ranks were not done after {seconds} seconds"
    finally:
        for process in work.processes:
            process.kill()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def _import_once() -> None:
    """Fork processes from one that has imported this module, which would take each of them seconds."""
    forkserver.set_forkserver_preload([__name__])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # the server does not inherit sys.path
        forkserver.ensure_running()


def _run(rank: int, ranks: int, port: int, target: Callable, folder: Path, arguments: tuple) -> None:
    torch.set_num_threads(1)

    # The environment that torchrun gives each process.
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()}, MASTER_ADDR="127.0.0.1")
    with ExitStack() as stack:
        result = target(lambda: stack.enter_context(joined("cpu")), *arguments)
    torch.save(result, folder / f"rank{rank}.pt")
