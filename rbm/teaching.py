"""What a student learns from: a trained teacher's soft labels, and what else a teacher can tell about them."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rbm.cache import Cache
from rbm.config import Config
from rbm.metrics import evaluating
from rbm.progress import Progress
from rbm.reliability import entropy_change
from rbm.splits import GraphSplit
from rbm.teachers import Teacher, build_teacher, edges_for, features_for
from rbm.training import Result, split_accuracies


@dataclass(frozen=True)
class Teaching:
    """A teacher's answers on the observed graph (and on the full one), as students take them.

    Attributes:
        soft_labels: logits of the observed nodes, ``[N_observed, C]``. In the inductive setting the teacher saw the
            observed graph alone: one that never met the unseen nodes must not meet them here either.
        logits: on the full graph, ``[N, C]``.
        entropy_change: ``[N_observed]`` in [0, 1], see :func:`rbm.reliability.entropy_change`; zeros, which trust every
            node, where there is no module to disturb the input of.
        embedding: its last hidden layer ``[N_observed, H]``, or None where it shows none.
        result: accuracies, as in ``summary.json``.
    """

    soft_labels: Tensor
    logits: Tensor
    entropy_change: Tensor
    embedding: Tensor | None
    result: dict[str, Any]


def teaching_from_logits(logits: Tensor, split: GraphSplit) -> Teaching:
    """From logits ``[N, C]`` on the full graph alone."""
    check_logits(logits, split.graph.num_nodes, logits.shape[-1])
    logits = logits.detach().to(split.graph.x.device, torch.float32)
    soft_labels = logits[split.observed_nodes]
    trusted = torch.zeros(len(soft_labels), device=logits.device)
    return Teaching(soft_labels, logits, trusted, None, _given_result(soft_labels, logits, split))


@torch.no_grad()
def teaching_from_module(
    teacher: nn.Module, split: GraphSplit, config: Config, classes: int, result: dict[str, Any] | None = None
) -> Teaching:
    """From a trained module ``teacher(x, edge_index) -> logits [N, C]``; ``result`` is that of its training."""
    full, observed = split.graph, split.observed
    with evaluating(teacher):
        logits = teacher(features_for(teacher, full.x), edges_for(teacher, full))
        check_logits(logits, full.num_nodes, classes)
        soft_labels = logits
        if len(split.unseen_nodes):
            soft_labels = teacher(features_for(teacher, observed.x), edges_for(teacher, observed))
        embedding = None
        if config.distill.similarity_weight > 0 and hasattr(teacher, "embed"):
            embedding = teacher.embed(features_for(teacher, observed.x), edges_for(teacher, observed))
    change = torch.zeros(observed.num_nodes, device=logits.device)
    if config.distill.neighbors:
        noise = config.reliability
        change = entropy_change(
            teacher,
            observed,
            noise_std=noise.noise_std,
            num_samples=noise.num_samples,
            squared=noise.squared,
            seed=config.seed,
        )
    return Teaching(soft_labels, logits, change, embedding, result or _given_result(soft_labels, logits, split))


def build_configured_teacher(config: Config, features: int, classes: int) -> Teacher:
    """The untrained teacher that the configuration describes."""
    section = config.teacher
    return build_teacher(
        section.name,
        features,
        classes,
        hidden_channels=section.hidden_channels,
        num_layers=section.num_layers,
        dropout=section.dropout,
        norm=section.norm,
    )


def cached_teacher(
    teacher: nn.Module,
    split: GraphSplit,
    config: Config,
    cache: Cache,
    train: Callable[[], dict[str, Any]],
    progress: Progress,
) -> dict[str, Any]:
    """Train ``teacher`` by ``train()``, which returns its result, unless the cache holds one trained just so."""
    known = True

    def compute() -> dict[str, Tensor]:
        nonlocal known
        known = False
        trained = json.dumps(train()).encode()
        return {**teacher.state_dict(), "result": torch.frombuffer(bytearray(trained), dtype=torch.uint8)}

    graph = split.observed
    settings = {"teacher": asdict(config.teacher), "seed": config.seed}
    # Unseen nodes do not train a teacher, but its test accuracy is theirs.
    inputs = [graph.x, graph.edge_index, graph.y, graph.train_mask, graph.val_mask, graph.test_mask]
    inputs += [split.graph.edge_index, split.graph.y, split.unseen_nodes]
    tensors = cache.tensors("teacher", settings, inputs, compute)
    result = json.loads(bytes(tensors.pop("result").tolist()))
    teacher.load_state_dict(tensors)
    if known:
        progress.say(f"teacher: trained before, taken from {cache.folder}")
    return result


def check_logits(logits: Tensor, nodes: int, classes: int) -> None:
    """Raise ValueError unless ``logits`` is finite and ``[nodes, classes]``."""
    if not isinstance(logits, Tensor) or logits.shape != (nodes, classes):
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"teacher logits have shape {shape}, expected [{nodes}, {classes}]: one row a node of the full graph,"
            " one column a class"
        )
    if not torch.isfinite(logits).all():
        row = int((~torch.isfinite(logits)).any(-1).nonzero()[0])
        raise ValueError(f"teacher logits of node {row} are not finite; every node needs a finite row")


def _given_result(observed_logits: Tensor, full_logits: Tensor, split: GraphSplit) -> dict[str, Any]:
    accuracies = split_accuracies(observed_logits, full_logits, split)
    return asdict(Result(accuracies.val, accuracies.test, accuracies.test))
