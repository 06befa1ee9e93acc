"""Output and paths that are not in the encoding of the terminal, or not in UTF-8."""

import io
import os
import sys

import pytest
import torch

from rbm.cli import main
from rbm.experiments.results import ACCURACIES, COLUMNS, append_rows

LATIN = os.fsdecode(b"gr\xe4ph")  # a name in Latin-1, in a system whose names are UTF-8


def test_characters_that_the_terminal_lacks_do_not_end_a_command(tmp_path, monkeypatch):
    figures = dict.fromkeys(ACCURACIES, "0.5") | {"dataset": "cora", "setting": "inductive", "protocol": "rbm"}
    figures |= {"teacher": "sage", "preset": "clean", "method": "rbm"}
    append_rows(tmp_path / "rows.csv", [dict.fromkeys(COLUMNS, "") | figures | {"seed": seed} for seed in "01"])
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "argv", ["rbm", "table", str(tmp_path / "rows.csv")])
    with pytest.raises(SystemExit) as end:
        main()
    output.flush()
    assert (end.value.code, "50.00 ? 0.00" in output.buffer.getvalue().decode()) == (0, True)


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no such names")
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--dataset", f"{LATIN}/graph.pt"), "dataset"),
        (("--dataset", "graph.pt", "--out", LATIN), "run folder"),
        (("--dataset", "graph.pt", "--cache", LATIN), "cache"),
    ],
)
def test_a_path_that_is_not_utf8_is_refused_before_training(
    command, small_graph, tmp_path, monkeypatch, arguments, what
):
    """Regression test: the run failed at its first file that names the graph, after all trainings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rbm.distillation.distill.prepare_teacher", lambda *_, **__: pytest.fail("trained"))
    (tmp_path / LATIN).mkdir()
    for folder in (tmp_path, tmp_path / LATIN):
        torch.save(small_graph, folder / "graph.pt")
    status, _, err = command("distill", *arguments)
    assert status == 2
    assert f"{what} is 'gr\\udce4ph" in err
    assert "which is not UTF-8; rename it" in err
    monkeypatch.chdir(tmp_path / LATIN)
    status, _, err = command("distill", "--dataset", "graph.pt", "--out", "run")
    assert status == 2
    assert f"dataset is {str(tmp_path / LATIN / 'graph.pt')!a}, which is not UTF-8" in err
