"""The figures of a report: results of every model of a finished run on the test nodes, stored in ``report.json``.

Figures on test nodes do not affect the choice of a student or a setting. The kept student, the settings and the verdict
come from validation nodes (:mod:`rbm.distillation.verdict`).
"""

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.metrics import f1_score, recall_score
from torch import Tensor, nn

from rbm.datasets.splits import GraphSplit
from rbm.distillation.report.experts import observe_experts
from rbm.distillation.report.run_data import FORMAT, TEACHER
from rbm.distillation.result import Distillation
from rbm.distillation.verdict import compare
from rbm.nn.evaluation import evaluating
from rbm.nn.half_rows import HalfPrecisionRows
from rbm.nn.sparse_rows import Rows
from rbm.utils.chunks import drawn_rows
from rbm.utils.environment import package_version, today

MOST_NODES = 2**17  # maximum number of test nodes; of more, a random sample is used
MOST_DISAGREEMENTS = 300  # maximum number of listed disagreements
BINS = 10  # bins of the reliability curve
PACKAGES = ("rbm-kernels", "torch", "torch-geometric", "numpy", "scipy", "scikit-learn", "matplotlib")
_CHUNK_ROWS = 2**15


@torch.no_grad()
def observe(result: Distillation) -> dict[str, Any]:
    """The figures of ``report.json``.

    Returns:
        ``models``: the teacher (if its logits are known) and every student, each with its number of correct
        predictions, macro F1, balanced accuracy, log loss, expected calibration error, reliability bins and confusion
        matrix (rows: true class, columns: predicted class); ``degree`` and ``homophily``: the same nodes in groups,
        with the number of correct predictions of every model; ``behind_kept``: for every other model, the
        :class:`~rbm.distillation.verdict.Comparison` of the kept student with it; ``disagreements``: of the kept
        student with the teacher; ``experts``: figures of a mixture, or None; and ``made``: the software and hardware.
    """
    split, seed = result.split, result.config.seed
    nodes, total = _test_nodes(split, seed)
    labels = split.graph.y[nodes.to(split.graph.y.device)].cpu().numpy()
    answers = {} if result.teacher_logits is None else {TEACHER: _answers(result.teacher_logits[nodes].float())}
    for method, student in result.students.items():
        answers[method] = _answers(_logits(student, result.student_inputs(method), nodes))
    right = {name: probabilities.argmax(1) == labels for name, probabilities in answers.items()}
    classes = max([int(labels.max()) + 1, *(probabilities.shape[1] for probabilities in answers.values())])
    degrees, homophily = _neighborhoods(split, nodes)
    return {
        "format": FORMAT,
        "nodes": len(nodes),
        "of": total,
        "unseen": len(split.unseen_nodes) > 0,
        "kept": result.method,
        "classes": classes,
        "support": np.bincount(labels, minlength=classes).tolist(),
        "models": {name: figures(probabilities, labels, classes) for name, probabilities in answers.items()},
        "behind_kept": _behind(right, result.method),
        "degree": _groups(_degree_group(degrees), _degree_name, right),
        "homophily": _groups(_homophily_group(homophily), _homophily_name, right),
        "disagreements": _disagreements(answers, result.method, labels, nodes.numpy(), degrees, homophily),
        "experts": observe_experts(result, seed),
        "made": _made(split),
    }


def figures(probabilities: np.ndarray, labels: np.ndarray, classes: int) -> dict[str, Any]:
    """Accuracy and calibration of a model.

    The expected calibration error is that of Guo et al. (On calibration of modern neural networks, ICML 2017): the mean
    absolute difference of accuracy and confidence over :data:`BINS` confidence bins of equal width, weighted by nodes.

    Args:
        probabilities: float ``[n, C]``, rows sum to one.
        labels: int ``[n]`` in [0, C).
        classes: C.
    """
    answers, confidence = probabilities.argmax(1), probabilities.max(1)
    right = answers == labels
    bin_of_node = np.minimum((confidence * BINS).astype(int), BINS - 1)
    bins = []
    for number in np.unique(bin_of_node):
        in_bin = bin_of_node == number
        bins.append(
            {
                "confidence": round(float(confidence[in_bin].mean()), 5),
                "accuracy": round(float(right[in_bin].mean()), 5),
                "nodes": int(in_bin.sum()),
            }
        )
    of_label = probabilities[np.arange(len(labels)), labels]
    of_classes = {"labels": np.unique(labels), "average": "macro", "zero_division": 0}
    return {
        "right": int(right.sum()),
        "macro_f1": round(float(f1_score(labels, answers, **of_classes)), 5),
        "balanced": round(float(recall_score(labels, answers, **of_classes)), 5),
        "log_loss": round(float(-np.log(np.maximum(of_label, 1e-12)).mean()), 5),
        "ece": round(sum(bin_["nodes"] * abs(bin_["accuracy"] - bin_["confidence"]) for bin_ in bins) / len(labels), 5),
        "bins": bins,
        "confusion": _confusion(labels, answers, classes).tolist(),
    }


def _confusion(labels: np.ndarray, answers: np.ndarray, classes: int) -> np.ndarray:
    """Counts ``[C, C]`` of nodes by true and predicted class. scikit-learn's function warns of a single class."""
    return np.bincount(labels * classes + answers, minlength=classes**2).reshape(classes, classes)


def _test_nodes(split: GraphSplit, seed: int) -> tuple[Tensor, int]:
    """At most :data:`MOST_NODES` of the nodes that define test accuracy, and the number of all of them."""
    unseen = split.unseen_nodes
    nodes = unseen.cpu() if len(unseen) else split.graph.test_mask.cpu().nonzero().flatten()
    nodes = nodes[split.graph.y.cpu()[nodes] >= 0]
    return nodes[drawn_rows(len(nodes), MOST_NODES, seed)], len(nodes)


def _logits(student: nn.Module, x: Rows | HalfPrecisionRows, nodes: Tensor) -> Tensor:
    nodes = nodes.to(x.device)
    with evaluating(student):
        return torch.cat([student(x[part]).float().cpu() for part in nodes.split(_CHUNK_ROWS)])


def _answers(logits: Tensor) -> np.ndarray:
    return logits.cpu().double().softmax(1).numpy()


def _neighborhoods(split: GraphSplit, nodes: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """In-degree of each node without self-loops, int ``[n]``; and the share of its in-neighbours with a known label
    that have its class, float ``[n]``, NaN if no neighbour's label is known.
    """
    graph = split.graph
    sources, targets = graph.edge_index.cpu()
    y = graph.y.cpu()
    no_loop = sources != targets
    sources, targets = sources[no_loop], targets[no_loop]
    degrees = torch.bincount(targets, minlength=graph.num_nodes)
    known = y[sources] >= 0
    counted = torch.bincount(targets[known], minlength=graph.num_nodes)
    same = torch.bincount(targets[known & (y[sources] == y[targets])], minlength=graph.num_nodes)
    share = same.double() / counted.double()  # 0 / 0 is NaN
    return degrees[nodes].numpy(), share[nodes].numpy()


def _degree_group(degrees: np.ndarray) -> np.ndarray:
    """Groups of degrees: 0 to 4 separately, then 5 to 8, 9 to 16, ..."""
    return np.where(degrees < 5, degrees, 2 + np.ceil(np.log2(np.maximum(degrees, 1)))).astype(int)


def _degree_name(group: int) -> str:
    if group < 5:
        return str(group)
    return f"{2 ** (group - 3) + 1} to {2 ** (group - 2)}"


def _homophily_group(share: np.ndarray) -> np.ndarray:
    """Groups of homophily: fifths of [0, 1), then 1 separately; -1 without a known neighbour."""
    return np.where(np.isnan(share), -1, np.floor(np.nan_to_num(share) * 5 + 1e-9)).astype(int)


def _homophily_name(group: int) -> str:
    return "100" if group == 5 else f"{20 * group} to {20 * group + 20}"


def _behind(right: dict[str, np.ndarray], kept: str) -> dict[str, dict[str, float]]:
    ours = torch.from_numpy(right[kept])
    return {name: compare(ours, torch.from_numpy(theirs))._asdict() for name, theirs in right.items() if name != kept}


def _groups(group: np.ndarray, name: Callable[[int], str], right: dict[str, np.ndarray]) -> dict[str, Any]:
    present = [int(number) for number in np.unique(group) if number >= 0]
    return {
        "names": [name(number) for number in present],
        "nodes": [int((group == number).sum()) for number in present],
        "right": {
            model: [int(correct[group == number].sum()) for number in present] for model, correct in right.items()
        },
        "left_out": int((group < 0).sum()),
    }


def _disagreements(
    answers: dict[str, np.ndarray],
    kept: str,
    labels: np.ndarray,
    nodes: np.ndarray,
    degrees: np.ndarray,
    homophily: np.ndarray,
) -> dict[str, Any] | None:
    """Nodes on which the kept student and the teacher disagree, the most confident student predictions first."""
    if TEACHER not in answers:
        return None
    theirs, ours = answers[TEACHER].argmax(1), answers[kept].argmax(1)
    their_right, our_right = theirs == labels, ours == labels
    differing = np.flatnonzero(theirs != ours)
    confidence = answers[kept].max(1)
    order = differing[np.lexsort((differing, -confidence[differing]))][:MOST_DISAGREEMENTS]
    return {
        "count": len(differing),
        "both_right": int((their_right & our_right).sum()),
        "student_right": int((our_right & ~their_right).sum()),
        "teacher_right": int((their_right & ~our_right).sum()),
        "both_wrong": int((~their_right & ~our_right).sum()),
        "columns": ["node", "class", "teacher", "teacher_sure", "student", "student_sure", "degree", "homophily"],
        "rows": [
            [
                *(int(nodes[i]), int(labels[i]), int(theirs[i]), round(float(answers[TEACHER][i].max()), 4)),
                *(int(ours[i]), round(float(confidence[i]), 4), int(degrees[i])),
                None if np.isnan(homophily[i]) else round(float(homophily[i]), 4),
            ]
            for i in order
        ],
    }


def _made(split: GraphSplit) -> dict[str, Any]:
    return {
        "date": today(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} on {platform.machine()}",
        "device": str(split.graph.x.device),
        "threads": torch.get_num_threads(),
        "versions": {name: package_version(name) for name in PACKAGES},
    }
