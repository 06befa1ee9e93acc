"""``rbm distill --help`` names what its options accept."""

import re

import typer

from rbm.cli import app
from rbm.distillation.registry import METHODS
from rbm.distillation.verdict import LABELS_ALONE
from rbm.teachers import TEACHERS


def test_help_names_every_student_and_every_teacher():
    distill = typer.main.get_command(app).commands["distill"]
    texts = {parameter.name: parameter.help for parameter in distill.params}
    words = {name: set(re.findall(r"\w+", text)) for name, text in texts.items()}
    assert set(METHODS) - {LABELS_ALONE} <= words["method"]
    assert {*TEACHERS, "logits"} <= words["teacher"]
