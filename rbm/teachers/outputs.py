"""The outputs of a trained teacher for students: soft labels, hidden rows, changes of entropy under noise."""

import inspect
import logging
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from rbm.config import ReliabilityConfig
from rbm.datasets.splits import GraphSplit
from rbm.datasets.validation import first_ids
from rbm.nn.evaluation import evaluating
from rbm.nn.sparse_rows import in_single_precision, to_dense
from rbm.teachers import edges_for, features_for
from rbm.training.selection import Result, split_accuracies
from rbm.utils.chunks import row_chunks, rows_not_finite
from rbm.utils.distributed import broadcast_from_rank0, compute_once, forked

# Share of the accuracy above guessing. On Cora, GATs with 0.05 taught GLNN at most half of what they knew, and teachers
# with 0.6 and more all of it. On CiteSeer, a GLNN did not learn a class for which RevGAT had 0.1.
_LEAST_CONFIDENCE = 0.2
_FEWEST_NODES = 5


@dataclass(frozen=True, eq=False)
class TeacherOutputs:
    """A teacher's outputs on the observed graph and on the full graph.

    Attributes:
        soft_labels: logits of the observed nodes, ``[N_observed, C]``. Unseen nodes have no rows here: in the inductive
            setting, a teacher module computes these logits on the observed graph only.
        logits: logits on the full graph, ``[N, C]``.
        result: accuracies, as in ``summary.json``.
        module: the teacher, or None if only logits are known.
        observed: the observed graph, the input of ``module``.
        hidden: the last hidden layer, ``[N_observed, H]``, if there is no module to compute it.
    """

    soft_labels: Tensor
    logits: Tensor
    result: dict[str, Any]
    module: nn.Module | None = None
    observed: Data | None = None
    hidden: Tensor | None = None
    _changes: dict[tuple, Tensor] = field(default_factory=dict)

    def entropy_change(self, config: ReliabilityConfig, seed: int) -> Tensor:
        """``[N_observed]`` in [0, 1], see :func:`entropy_change`; zeros, which mean full trust, if there is no module.
        Computed once for all students.
        """
        if self.module is None:
            return torch.zeros(len(self.soft_labels), device=self.soft_labels.device)
        noise = {"noise_std": config.noise_std, "num_samples": config.num_samples, "squared": config.squared}
        return compute_once(
            self._changes,
            (*noise.values(), seed),
            lambda: entropy_change(self.module, self.observed, **noise, seed=seed),
        )

    @torch.no_grad()
    def embedding(self, reason: str) -> Tensor:
        """The teacher's last hidden layer, ``[N_observed, H]``.

        Raises:
            ValueError: it is not available. The message begins with ``reason``, the setting that needs it.
        """
        if self.hidden is not None:
            return self.hidden
        if not hasattr(self.module, "embed"):
            raise no_hidden_layer(reason)
        module, observed = self.module, self.observed
        with evaluating(module):
            return broadcast_from_rank0(
                lambda: module.embed(features_for(module, observed.x), edges_for(module, observed)).detach().float()
            )


def no_hidden_layer(reason: str) -> ValueError:
    """The error about a teacher without a method ``embed``; ``reason`` is the setting that needs it."""
    return ValueError(
        f"{reason}, but this teacher shows no hidden layer; set it otherwise, or use a teacher of this package, or one"
        " with a method embed(x, edge_index) -> [N, H]"
    )


@torch.no_grad()
def entropy_change(
    teacher: nn.Module,
    graph: Data,
    *,
    noise_std: float = 1.0,
    num_samples: int = 1,
    squared: bool = False,
    seed: int = 0,
) -> Tensor:
    """Change of the entropy of each node's soft label under noise on all features, divided by the largest change.

    Mean over ``num_samples`` draws of ``|H(y~) - H(y)|``, or of its square if ``squared`` (the paper's Eq. 10), with
    natural logarithms and the teacher in eval mode. The global random state is left unchanged. A teacher that draws
    random numbers in eval mode draws them from ``seed``.

    Returns:
        ``[N]`` in [0, 1] on the graph's device; all zeros if no entropy changes.
    """
    x = to_dense(in_single_precision(graph.x))
    edges = edges_for(teacher, graph)
    generator = torch.Generator().manual_seed(seed)
    change = torch.zeros(x.shape[0], device=x.device)
    # The first method that needs the change computes it for all. Its own draws must not depend on that.
    with evaluating(teacher), forked():
        torch.manual_seed(seed)
        unperturbed = _entropy(teacher(features_for(teacher, graph.x), edges))
        for _ in range(num_samples):
            # Drawn on the CPU, so that every device gets the same noise.
            noise = torch.empty(x.shape).normal_(0.0, noise_std, generator=generator).to(x)
            difference = (_entropy(teacher(noise.add_(x), edges)) - unperturbed).abs()
            change += difference.square() if squared else difference
    largest = change.max()
    return change / largest if largest > 0 else change


def _entropy(logits: Tensor) -> Tensor:
    log_probabilities = logits.float().log_softmax(-1)
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


def outputs_from_logits(logits: Tensor, split: GraphSplit) -> TeacherOutputs:
    """Outputs from logits ``[N, C]`` on the full graph."""
    check_logits(logits, split.graph.num_nodes, logits.shape[-1])
    logits = logits.detach().to(split.graph.x.device, torch.float32)
    soft_labels = split.of_observed(logits)  # without a copy: logits may take most of a graph's memory
    return TeacherOutputs(soft_labels, logits, _given_result(soft_labels, logits, split))


@torch.no_grad()
def outputs_from_module(
    teacher: nn.Module, split: GraphSplit, classes: int, result: dict[str, Any] | None = None
) -> TeacherOutputs:
    """Outputs from a trained module ``teacher(x, edge_index) -> logits [N, C]``; ``result`` is that of its training."""
    full, observed = split.graph, split.observed
    with evaluating(teacher):
        logits = _answer(teacher, full, classes).detach()  # of a parameter, or of a module that turns gradients on
        check_logits(logits, full.num_nodes, classes)
        soft_labels = logits = logits.float()  # a given module may return another dtype, such as that of autocast
        if len(split.unseen_nodes):
            soft_labels = teacher(features_for(teacher, observed.x), edges_for(teacher, observed)).detach().float()
    result = result or _given_result(soft_labels, logits, split)
    return TeacherOutputs(soft_labels, logits, result, teacher, observed)


def warn_of_flat_soft_labels(outputs: TeacherOutputs, split: GraphSplit) -> None:
    """Warn of classes that a teacher predicts correctly, but with hardly more probability than the other classes.

    Students learn from probabilities, so they learn little about these classes. Such a teacher is a network that
    stopped after a few epochs, or was given with logits of a very small scale. The confidence (the mean probability of
    the predicted class) is compared with the share of correct predictions, among the validation nodes that the teacher
    assigns to a class, both above guessing.
    """
    observed = split.observed
    confidences, classes = outputs.soft_labels[observed.val_mask].float().softmax(-1).max(-1)
    right = (classes == observed.y[observed.val_mask]).float()
    guess = 1 / outputs.soft_labels.shape[1]
    counts = torch.bincount(classes, minlength=outputs.soft_labels.shape[1])
    confidence, precision = (torch.bincount(classes, each, len(counts)) / counts for each in (confidences, right))
    flat = (counts >= _FEWEST_NODES) & (confidence - guess < _LEAST_CONFIDENCE * (precision - guess))
    if flat.any():
        nodes = flat[classes]
        kind, pronoun = ("class", "it") if flat.sum() == 1 else ("classes", "them")
        logging.getLogger("rbm").warning(
            "teacher: it is right on %.0f%% of the validation nodes that it assigns to %s %s, but with a mean"
            " probability of %.0f%% (%.0f%% is guessing), so students learn little about %s. Train it for longer, for"
            " example with teacher.min_epochs: 100, or multiply the logits of a given teacher by a constant.",
            *(100 * right[nodes].mean(), kind, first_ids(flat.nonzero().flatten())),
            *(100 * confidences[nodes].mean(), 100 * guess, pronoun),
        )


def check_module(teacher: nn.Module) -> None:
    """Raise TypeError if the arguments of ``teacher`` do not allow the call ``teacher(x, edge_index)``."""
    try:
        signature = inspect.signature(teacher.forward)
    except ValueError:  # compiled code may not tell
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"teacher is a {type(teacher).__name__} with forward{signature}, which cannot be called as"
            f" teacher(x, edge_index) ({error}); wrap it in a module whose forward takes these two"
        ) from None


@torch.no_grad()
def check_untrained(teacher: nn.Module, graph: Data, classes: int) -> None:
    """Raise unless a plugin's untrained teacher answers for ``graph`` with one row a node and one column a class.

    Raises:
        TypeError: it cannot be called as ``teacher(x, edge_index)``, returns no tensor, or has parameters of another
            dtype than float32.
        ValueError: the tensor has another shape, or there is no parameter to train.
    """
    check_module(teacher)
    if not any(parameter.requires_grad for parameter in teacher.parameters()):
        raise ValueError(
            f"teacher is a {type(teacher).__name__}, which has no parameter to train; pass what it computes as logits"
            " instead"
        )
    # A model that draws random numbers here is then trained with the same ones as without this check.
    with evaluating(teacher), torch.random.fork_rng(devices=[]):
        _answer(teacher, graph, classes)


def _answer(teacher: nn.Module, graph: Data, classes: int) -> Tensor:
    """What a module answers for a graph; raises the errors of :func:`check_untrained` about it."""
    name = f"teacher is a {type(teacher).__name__}"
    try:
        logits = teacher(features_for(teacher, graph.x), edges_for(teacher, graph))
    except RuntimeError as error:
        kinds = {str(value.dtype) for value in teacher.parameters() if value.is_floating_point()} - {"torch.float32"}
        if not kinds:
            raise
        raise TypeError(
            f"{name} with parameters of {min(kinds)}, which fails for float32 features ({error}); use teacher.float()"
        ) from error
    expected = f"expected a tensor of logits [{graph.num_nodes}, {classes}]: one row a node, one column a class"
    if not isinstance(logits, Tensor):
        raise TypeError(f"{name}, which returned a {type(logits).__name__}, {expected}; return them alone")
    _check_kind(f"{name}, which returned", logits)
    if logits.shape != (graph.num_nodes, classes):
        raise ValueError(f"{name}, which returned a tensor {list(logits.shape)}, {expected}")
    return logits


def check_logits(logits: Tensor, nodes: int, classes: int) -> None:
    """Raise ValueError unless ``logits`` is dense, real, finite and ``[nodes, classes]``, or if its rows are
    probabilities.

    The softmax of probabilities is almost the same for all classes, so students would learn next to nothing from them.
    """
    if isinstance(logits, Tensor):
        _check_kind("teacher logits are", logits)
    if not isinstance(logits, Tensor) or logits.shape != (nodes, classes):
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"teacher logits have shape {shape}, expected [{nodes}, {classes}]: one row a node of the full graph,"
            " one column a class"
        )
    if len(bad := rows_not_finite(logits)):
        raise ValueError(f"teacher logits of node {int(bad[0])} are not finite; every node needs a finite row")
    if classes > 1 and _are_probabilities(logits):
        raise ValueError(
            "teacher logits are probabilities: no number is negative and every row sums to one; give their logarithms,"
            " such as probabilities.clamp_min(1e-9).log(), or the teacher's output before its softmax"
        )


def _check_kind(what: str, logits: Tensor) -> None:
    """Raise ValueError unless a tensor is dense and has real numbers; ``what`` begins the message."""
    kinds = {
        "meta": (logits.is_meta, ""),
        "nested": (logits.is_nested, ""),
        "sparse": (logits.layout is not torch.strided, "; use logits.to_dense()"),
        "quantized": (logits.is_quantized, "; use logits.dequantize()"),
        "complex": (logits.is_complex(), ""),
    }
    for kind, (found, remedy) in kinds.items():
        if found:
            raise ValueError(f"{what} a {kind} tensor, expected a dense one of real numbers{remedy}")


def _are_probabilities(table: Tensor) -> bool:
    """Whether every row of a finite table ``[N, C]``, possibly of half precision, is a distribution over C classes."""
    parts = (table[rows].float() for rows in row_chunks(len(table)))
    return all(bool((part >= 0).all() and ((part.sum(-1) - 1).abs() < 0.01).all()) for part in parts)


def _given_result(observed_logits: Tensor, full_logits: Tensor, split: GraphSplit) -> dict[str, Any]:
    accuracies = split_accuracies(observed_logits, full_logits, split)
    return asdict(Result(accuracies.val, accuracies.test, accuracies.test))
