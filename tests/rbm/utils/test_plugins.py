"""The plugin shown in CONTRIBUTING.md."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rbm_process import RbmProcess

from rbm.datasets import DATASETS
from rbm.distillation.registry import METHODS
from rbm.teachers import TEACHERS
from rbm.utils.plugins import load_plugin

ROOT = Path(__file__).resolve().parents[3]
FEW = [f"--set={section}.max_epochs=40" for section in ("teacher", "glnn")]

GATED = """

def train_gated(task):
    settings = task.config.glnn
    student = task.new_student(GatedStudent, settings)
    trainer = GLNNTrainer(student, task.split, task.teacher_outputs, settings)
    return TrainedStudent(student, task.fit("gated", trainer, settings), None)


METHODS["gated"] = Method("Gated", ("teacher", "glnn"), train_gated)
"""
SERVED = """
import sys

import numpy as np
import torch

import rbm
from rbm.nn.saved_student import STUDENTS
from rbm.serving.prediction import predict_file
from rbm.utils.plugins import load_plugin

load_plugin(sys.argv[1])
few = {"max_epochs": 3}
data = rbm.load_dataset("rings")
result = rbm.distill(
    data,
    teacher="mean",
    config=rbm.Config().updated({"teacher": few, "glnn": few}),
    methods=["gated"],
    keep="gated",
    folder="run",
    plots=False,
)
student = rbm.load("run")
with torch.inference_mode():
    logits = student(data.x)
assert torch.equal(logits, result.student(data.x))
np.save("x.npy", data.x.numpy())
assert predict_file("run", "x.npy", "p.npy") == 300
np.testing.assert_allclose(np.load("p.npy"), logits.softmax(1).numpy(), atol=1e-6)
exported = torch.export.load(rbm.export_student("run")).module()
torch.testing.assert_close(exported(data.x), logits, atol=1e-5, rtol=0)
STUDENTS.pop("GatedStudent")
try:
    rbm.load("run")
except ValueError as error:
    print(error)
"""


@pytest.fixture
def plugin(tmp_path) -> Path:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r"```python\n(# mine.py\n.*?)```", text, flags=re.DOTALL)
    (student,) = re.findall(r"```python\n([^`]*class GatedStudent.*?)```", text, flags=re.DOTALL)
    file = tmp_path / "mine.py"
    file.write_text(code + student + GATED)
    return file


def run(*arguments, cwd: Path) -> subprocess.CompletedProcess:
    """Run in a separate process, so that a plugin's additions do not affect other tests."""
    command = [sys.executable, "-m", "rbm", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_one_file_adds_a_method_a_teacher_and_a_dataset(plugin, tmp_path):
    chosen = ["--dataset", "rings", "--teacher", "mean", "--method", "copycat", *FEW]
    done = RbmProcess("--plugin", plugin, "distill", *chosen, "--out", "run", cwd=tmp_path)
    out, err = done.finish()
    assert done.returncode == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["teacher"]["name"] == "mean"
    assert summary["nodes"] == 300
    assert summary["copycat"]["test_accuracy"] > 0.5, "a third is chance"
    assert "Copycat" in out


def test_a_teacher_whose_code_has_changed_is_trained_again(plugin, tmp_path):
    """Regression test: its weights and its accuracies were those of the former code, from the cache."""
    chosen = ["--dataset", "rings", "--teacher", "mean", "--method", "copycat", "--no-plots", "--set=glnn.max_epochs=2"]
    seen = []
    for code in ("self.around(x, edge_index)", "self.around(x, edge_index)", "-self.around(x, edge_index)"):
        plugin.write_text(re.sub(r"self.linear\(.*\)$", f"self.linear({code})", plugin.read_text(), flags=re.MULTILINE))
        done = run("--plugin", plugin, "distill", *chosen, "--out", "run", "--overwrite", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        seen.append("teacher: trained before, taken from" in done.stderr)
    assert seen == [False, True, False]


def test_worker_processes_know_it_too(plugin, tmp_path):
    chosen = ["--dataset", "rings", "--teacher", "mean", "--method", "copycat", *FEW]
    done = run("--plugin", plugin, "distill", *chosen, "--seeds", "0-1", "--jobs", "2", "--out", "o.csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "o.csv") as file:
        assert sorted(row["method"] for row in csv.DictReader(file)) == ["copycat"] * 2 + ["teacher"] * 2


def test_a_student_class_of_ones_own_is_served(plugin, tmp_path):
    (tmp_path / "served.py").write_text(SERVED)
    done = subprocess.run(
        [sys.executable, "served.py", plugin], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "its class GatedStudent is not one of them; if a plugin defines the class, load that first" in done.stdout


@pytest.mark.parametrize("made", ["task.new_student(Plain, settings)", "Plain(8, 16, 3)"])
def test_a_student_that_cannot_be_stored_is_refused(plugin, tmp_path, made):
    plain = """

class Plain(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.linear = torch.nn.Linear(in_channels, out_channels)

    def forward(self, x):
        return self.linear(x)
"""
    code = plugin.read_text().replace("\n\ndef train_gated", plain + "\n\ndef train_gated")
    plugin.write_text(code.replace("task.new_student(GatedStudent, settings)", made))
    chosen = ["--dataset", "rings", "--method", "gated", "--set=teacher.max_epochs=2", "--set=glnn.max_epochs=2"]
    done = run("--plugin", plugin, "distill", *chosen, "--no-plots", cwd=tmp_path)
    assert "student is a Plain, expected a subclass of HubMixin" in done.stderr


def test_a_plugin_cannot_take_the_name_of_a_student_of_the_package(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom rbm.nn.pretrained import HubMixin\n\n\nclass MLPStudent(HubMixin, torch.nn.Module):\n"
        "    pass\n"
    )
    with pytest.raises(ValueError, match=r"class MLPStudent has the name of a student .*give yours another name"):
        load_plugin(tmp_path / "mine.py")


def test_what_is_no_plugin(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"plugin .*nothing.py does not exist"):
        load_plugin(tmp_path / "nothing.py")
    with pytest.raises(ValueError, match=r"expected a Python file that ends in .py"):
        load_plugin(tmp_path / "mine.txt")
    (tmp_path / "mine.py").write_bytes(b"x = 1\0")  # Python names no line
    with pytest.raises(ValueError, match=r"mine\.py failed: (Syntax|Value)Error: source code string cannot contain"):
        load_plugin(tmp_path / "mine.py")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("METHODS['mine'] = lambda task: None", "method 'mine' is a function, expected a Method of rbm.distillation"),
        ("METHODS['mlp'] = METHODS['glnn']", "method 'mlp' is the package's; give yours another name"),
        ("TEACHERS['sage'] = TEACHERS['gcn']", "teacher 'sage' is the package's"),
        ("TEACHERS['mine'] = nn.Module", r"teacher 'mine' is Module, expected a subclass of torch.nn.Module with a me"),
        ("TEACHERS['mine'] = nn.Linear(1, 1)", "teacher 'mine' is a Linear, expected a subclass of torch.nn.Module"),
        ("DATASETS['cora'] = DATASETS['citeseer']", "dataset 'cora' is the package's"),
        ("DATASETS['Cora'] = DatasetInfo('Cora', 'own', '')", "dataset 'Cora' is another name of 'cora'"),
        (
            "DATASETS['mine'] = DatasetInfo('yours', 'own', '')",
            "dataset 'mine' has the name 'yours' in its DatasetInfo",
        ),
        ("DATASETS['mine'] = print", "dataset 'mine' is a builtin_function_or_method, expected a DatasetInfo of rbm"),
    ],
)
def test_entries_of_another_kind_or_name_are_refused_and_removed(tmp_path, line, message):
    before = [dict(entries) for entries in (METHODS, TEACHERS, DATASETS)]
    text = "from torch import nn\nfrom rbm.datasets import DATASETS, DatasetInfo\nfrom rbm.teachers import TEACHERS\n"
    (tmp_path / "mine.py").write_text(f"{text}from rbm.distillation.registry import METHODS\n{line}\n")
    with pytest.raises(ValueError, match=message):
        load_plugin(tmp_path / "mine.py")
    assert before == [METHODS, TEACHERS, DATASETS]
