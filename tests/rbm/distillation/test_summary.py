"""The table of a run's results."""

from io import StringIO

from rich.console import Console

from rbm.distillation.summary import results_table


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
