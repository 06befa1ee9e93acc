"""The report of ``rbm distill --seeds``."""

import pytest

from rbm.experiments.experiment import Experiment
from rbm.experiments.results import figures
from rbm.experiments.seeds import seeds_report

TEST = {"teacher": [80.0, 82.0, 81.0], "mlp": [81.0, 83.0, 83.0], "rbm": [79.0, 80.0, 82.0], "glnn": [60.0, 61.0, 62.0]}
VAL = {"teacher": 90.0, "mlp": 85.0, "rbm": 84.0, "glnn": 70.0}


def rows(dataset="mine/shop.npz", methods=("teacher", "mlp", "rbm"), seeds=3):
    return [
        {
            "dataset": dataset,
            "setting": "inductive",
            "protocol": "rbm",
            "teacher": "sage",
            "preset": "clean",
            "variant": "",
            "method": method,
            "seed": str(seed),
            "active_parameters": "1234",
            "test_at_best_val": f"{TEST[method][seed] / 100:.5f}",
            "val": f"{VAL[method] / 100:.5f}",
            "test_max": f"{TEST[method][seed] / 100 + 0.01:.5f}",
        }
        for method in methods
        for seed in range(seeds)
    ]


def chosen(dataset="mine/shop.npz", methods=("mlp", "rbm"), seeds=(0, 1, 2)):
    return Experiment(datasets=(dataset,), settings=("inductive",), methods=methods, seeds=seeds)


def test_a_line_for_each_model_and_the_best_student():
    others = rows(dataset="other.npz")
    lines = seeds_report(chosen(), [*others, *rows()]).splitlines()
    assert lines == [
        "shop, inductive, sage teacher, mean ± standard deviation over 3 seeds",
        "",
        "| | Test | Val | Test max | Active |",
        "|---|---:|---:|---:|---:|",
        "| Teacher | 81.00 ± 1.00 | 90.00 ± 0.00 | 82.00 ± 1.00 | 1,234 |",
        "| MLP student | 82.33 ± 1.15 | 85.00 ± 0.00 | 83.33 ± 1.15 | 1,234 |",
        "| RbM student | 80.33 ± 1.53 | 84.00 ± 0.00 | 81.33 ± 1.53 | 1,234 |",
        "",
        "Accuracies in per cent at the epoch with the best validation accuracy; Test max: maximum over epochs, as the"
        " paper's code reports it. Active: parameters that one prediction uses.",
        "Best student at validation: MLP student. On test nodes, it is 1.33 points ahead of the teacher (p = 0.057, may"
        " be chance); 2.00 points ahead of RbM student (p = 0.074, may be chance). p is that of a paired t-test"
        " over seeds.",
    ]


@pytest.mark.parametrize("unknown", ["", "None"])
def test_a_teacher_of_unknown_size(unknown):
    """Of given logits. Earlier versions wrote None."""
    found = [{**row, "active_parameters": unknown} if row["method"] == "teacher" else row for row in rows()]
    assert "| Teacher | 81.00 ± 1.00 | 90.00 ± 0.00 | 82.00 ± 1.00 |  |" in seeds_report(chosen(), found).splitlines()


def test_a_row_of_given_logits_has_no_size():
    result = {"test_accuracy": 0.8, "val_accuracy": 0.8, "test_max": 0.8, "best_epoch": 0, "epochs": 0}
    found = figures({**result, "parameters": None, "active_parameters": None}, {"seconds": 0.0})
    assert (found["parameters"], found["active_parameters"]) == ("", "")


def test_only_the_seeds_and_methods_of_the_command():
    found = seeds_report(chosen(methods=("glnn", "mlp"), seeds=(1,)), rows(methods=("teacher", "mlp", "rbm", "glnn")))
    assert found.startswith("shop, inductive, sage teacher, one seed\n")
    assert "RbM" not in found
    assert "| GLNN | 61.00 | 70.00 | 62.00 | 1,234 |" in found
    assert "it is 1.00 points ahead of the teacher; 22.00 points ahead of GLNN. One seed does not show" in found


@pytest.mark.parametrize(("dataset", "told"), [("cora", True), ("mine/shop.npz", False)])
def test_the_papers_figure(dataset, told):
    found = seeds_report(chosen(dataset), rows(dataset))
    assert ("The paper reports" in found) == told


def test_the_best_student_is_chosen_on_validation_nodes():
    better_at_test = {"test_at_best_val": "0.9"}
    found = seeds_report(chosen(), [{**row, **(better_at_test if row["method"] == "rbm" else {})} for row in rows()])
    assert "Best student at validation: MLP student. On test nodes, it is 1.33 points ahead of the teacher" in found
    assert "; 7.67 points behind RbM student" in found


def test_a_lead_beyond_chance_and_no_lead(monkeypatch):
    found = seeds_report(chosen(methods=("mlp", "glnn")), rows(methods=("mlp", "glnn")))
    assert "ahead of GLNN (p < 0.001, more than chance)." in found
    monkeypatch.setitem(TEST, "glnn", [80.0, 81.6, 81.0])
    found = seeds_report(chosen(methods=("mlp", "glnn")), rows(methods=("mlp", "glnn")))
    assert "1.47 points ahead of GLNN (p = 0.037, more than chance)." in found
    same = [{**row, "test_at_best_val": "0.5"} for row in rows()]
    assert "it is as accurate as the teacher; as accurate as RbM student. p is" in seeds_report(chosen(), same)
