"""The table of a run's results."""

import re
from io import StringIO

from rich.console import Console

from rbm.distillation import summary as summaries
from rbm.distillation.summary import results_markdown, results_table


def test_the_table_fits_where_output_is_redirected():
    model = {"test_accuracy": 1.0, "val_accuracy": 1.0, "test_max": 1.0, "parameters": 796682, "active_parameters": 99}
    summary = {"dataset": "data/rings[a].npz", "setting": "transductive", "seed": 0, "verdict": {"kept": "mlp"}}
    summary |= {"teacher": {**model, "name": "sage"}, "mlp": model, "rbm": model, "labels": model}
    times = {name: {"one_node_ms": 123.45, "all_nodes_ms": 1234.5} for name in ("teacher", "mlp", "rbm", "labels")}
    shown = StringIO()
    Console(file=shown, width=80).print(results_table(summary, times))
    assert "…" not in shown.getvalue()
    assert shown.getvalue().startswith("rings[a], transductive, "), "brackets in a name are no markup"
    assert shown.getvalue().count("100.00%") == 11
    assert shown.getvalue().count("796,682") == 4


def test_each_column_has_its_own_figure():
    figures = {"test_accuracy": 0.1, "val_accuracy": 0.2, "test_max": 0.3, "parameters": 4, "active_parameters": 5}
    summary = {"dataset": "cora", "setting": "inductive", "seed": 6, "verdict": {"kept": "mlp"}}
    summary |= {"teacher": {**figures, "name": "sage", "parameters": 2_345_678}, "mlp": figures, "labels": figures}
    times = {"mlp": {"one_node_ms": 0.789, "all_nodes_ms": 12.34}}
    shown = StringIO()
    Console(file=shown, width=120).print(results_table(summary, times))
    rows = [re.split(r"\s{2,}", line.strip()) for line in shown.getvalue().splitlines()]
    assert "cora, inductive, sage teacher, seed 6" in shown.getvalue()
    assert ["MLP student", "10.00%", "20.00%", "30.00%", "4", "5", "0.79", "12.3"] in rows
    assert ["MLP on labels", "10.00%", "20.00%", "4", "5"] in rows, "without a maximum, and without times"
    assert ["Teacher", "10.00%", "20.00%", "30.00%", "2.35 M", "5"] in rows


def test_a_name_cannot_break_the_markdown_table(monkeypatch):
    monkeypatch.setattr(summaries, "verdict_sentences", lambda verdict: [])
    figures = {"test_accuracy": 0.1, "val_accuracy": 0.2, "test_max": 0.3, "parameters": 4, "active_parameters": 5}
    summary = {"dataset": "users | shops\nof 2026", "setting": "inductive", "seed": 6, "verdict": {"kept": "mlp"}}
    heading, rule, *_ = results_markdown(summary | {"teacher": {**figures, "name": "sage"}}, {}).splitlines()
    assert heading.startswith("| users \\| shops of 2026, inductive, sage teacher, seed 6 | Test | ")
    assert len(re.findall(r"(?<!\\)\|", heading)) == rule.count("|")
