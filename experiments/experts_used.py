"""Measures how much a trained RbM student depends on its routing, and how closely it fits its teacher.

Students 128 wide for Cora and CiteSeer, on validation nodes as in ``experiments/searches/experts_shortlist.yaml``. Each
RbM student is evaluated three times: unchanged; with all experts of a layer replaced by their mean; and with each
expert's memory given to the next expert, so that experts get rows unlike those they were trained on. One row per
student; rows that OUT already has are not run again. Shares are in per cent.

    python experiments/experts_used.py ROOT results/experts_used.csv [CACHE]
"""

import copy
import itertools
import sys
from pathlib import Path

import torch
from torch import Tensor

import rbm
from rbm.config.presets import preset_config
from rbm.distillation.distill import Distillation
from rbm.utils.files import append_csv, read_csv

START = {"init_scale": 1.0, "init_attention": 1.0, "select_pretraining": True}
COLUMNS = (
    *("dataset", "setting", "seed", "method", "best_epoch", "teacher"),
    *("agreement_observed", "agreement_held_out", "held_out", "mean_expert", "other_expert"),
    *("where_teacher_is_right", "where_teacher_is_wrong"),
)


@torch.no_grad()
def with_mean_experts(student: rbm.RbMStudent) -> rbm.RbMStudent:
    """A copy in which all experts of a layer are replaced by their mean, with input scales folded in."""
    changed = copy.deepcopy(student)
    for layer in changed.layers:
        if layer.attention is not None:
            layer.weight.mul_(layer.attention.exp()[:, None, :])
            layer.attention.zero_()
        for parameter in (layer.weight, layer.bias):
            parameter.copy_(parameter.mean(0, keepdim=True).expand_as(parameter))
    return changed.eval()


@torch.no_grad()
def with_other_experts(student: rbm.RbMStudent) -> rbm.RbMStudent:
    """A copy in which each expert gets the rows of the next one."""
    changed = copy.deepcopy(student)
    for layer in changed.layers:
        layer.memory.copy_(layer.memory.roll(1, 0))
    return changed.eval()


@torch.no_grad()
def figures(result: Distillation, method: str) -> dict[str, str]:
    """A student's row, without the columns that identify the run."""
    split, student, x = result.split, result.students[method], result.student_inputs(method)
    unseen = split.unseen_nodes
    held_out = unseen if len(unseen) else split.graph.test_mask.nonzero().flatten()
    labels, predicted = split.graph.y, result.teacher_logits.argmax(-1)
    right = predicted == labels

    def share(found: Tensor) -> str:
        return f"{100 * found.float().mean():.2f}"

    answers = student(x).argmax(-1)
    correct = answers == labels
    row = {
        "method": method,
        "best_epoch": str(result.summary[method]["best_epoch"]),
        "teacher": share(right[held_out]),
        "agreement_observed": share((answers == predicted)[split.observed_nodes]),
        "agreement_held_out": share((answers == predicted)[held_out]),
        "held_out": share(correct[held_out]),
        "where_teacher_is_right": share(correct[held_out][right[held_out]]),
        "where_teacher_is_wrong": share(correct[held_out][~right[held_out]]),
    }
    if isinstance(student, rbm.RbMStudent):
        for name, change in (("mean_expert", with_mean_experts), ("other_expert", with_other_experts)):
            row[name] = share((change(student)(x).argmax(-1) == labels)[held_out])
    return row


def main(root: str, out: str, cache: str = "cache") -> None:
    path = Path(out)
    known = {(row["dataset"], row["setting"], row["seed"]) for row in read_csv(path, missing_ok=True)}
    for run in itertools.product(range(5), ("cora", "citeseer"), ("inductive", "transductive")):
        seed, dataset, setting = run
        if (dataset, setting, str(seed)) in known:
            continue
        config = preset_config("clean", dataset, setting).updated(
            {"seed": seed, "evaluate_on": "validation", "rbm": {"hidden_channels": 128} | START}
        )
        data = rbm.load_dataset(dataset, root, seed=seed)
        result = rbm.distill(data, config=config, labels_alone=False, cache=cache, measure_latency=False)
        about = {"dataset": dataset, "setting": setting, "seed": str(seed)}
        append_csv(path, [about | figures(result, method) for method in ("mlp", "rbm")], COLUMNS)
        print(*about.values(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
