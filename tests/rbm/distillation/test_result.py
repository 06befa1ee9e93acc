"""The result of `rbm.distill` in Python: names, progress, and how it prints."""

import io
import re
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from torch import nn

import rbm
from rbm.config import Config
from rbm.distillation.registry import METHODS
from rbm.distillation.run_graph import OWN_GRAPH, named_after_graph
from rbm.training.run_folder import open_run
from rbm.utils import progress

FEW = {"max_epochs": 2, "min_epochs": 0}
QUICK = {"teacher": FEW, "mlp": FEW, "encoding": {"deepwalk": False}}


def run(graph, **options) -> rbm.Distillation:
    few = {"config": Config().updated(QUICK), "methods": ["mlp"], "measure_latency": False}
    return rbm.distill(graph, **{**few, **options})


def test_the_result_is_its_table_and_its_verdict(small_graph):
    small_graph.name = "bonds <b>"
    result = run(small_graph)
    assert repr(result) == "Distillation(bonds <b>, transductive, students mlp, labels, keeps mlp)"
    text = str(result)
    assert max(map(len, text.splitlines())) <= 80
    assert "bonds <b>, transductive, sage teacher, seed 0" in text
    assert "(ms)" in text
    told = " ".join(text.split())
    assert all(sentence in told for sentence in result.verdict)
    page = result._repr_html_()
    assert "bonds &lt;b&gt;" in page
    assert "<b>" not in page
    assert page.count("<tr>") == 4
    assert f'<th style="text-align:right">{result.summary["mlp"]["test_accuracy"]:.2%}</th>' in page


def test_a_method_of_your_own_has_a_row(small_graph, monkeypatch):
    """Also if it was added after the table's module was imported."""
    monkeypatch.setitem(METHODS, "own", replace(METHODS["mlp"], title="My student"))
    assert re.search(r"^ *My student +[\d.]+%", str(run(small_graph, methods=["own"])), re.MULTILINE)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda trained: trained.student, "method Mine returned a MLPStudent, expected a TrainedStudent"),
        (lambda trained: trained._replace(student=nn.Identity()), "student is a Identity, expected a subclass of HubM"),
    ],
)
def test_what_a_method_of_your_own_returns_is_checked(small_graph, monkeypatch, wrong, message):
    train = METHODS["mlp"].train
    mine = replace(METHODS["mlp"], title="Mine", train=lambda task: wrong(train(task)))
    monkeypatch.setitem(METHODS, "own", mine)
    with pytest.raises(TypeError, match=message):
        run(small_graph, methods=["own"])


def test_what_a_graph_is_called(small_graph, tmp_path):
    """Its own name, or the configuration's if that is not the default; a resumed run keeps its name."""
    assert named_after_graph(Config(), small_graph, None).dataset == OWN_GRAPH
    assert rbm.load_dataset("digits").name == "digits"
    assert named_after_graph(Config(), rbm.load_dataset("digits"), None).dataset == "digits"
    assert named_after_graph(replace(Config(), dataset="cora"), small_graph, None).dataset == "cora"
    with open_run(tmp_path / "before", Config()):  # an earlier version gave every graph this name
        pass
    assert named_after_graph(Config(), small_graph, tmp_path / "before").dataset == "digits"


def test_a_name_that_no_file_can_hold_is_refused_before_training(small_graph, tmp_path):
    """Regression test: the run failed at its first file that names the graph, after all trainings."""
    small_graph.name = "gr\udce4ph"
    with pytest.raises(ValueError, match=r"data\.name is 'gr\\udce4ph', which is not UTF-8; rename it"):
        run(small_graph, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"dataset is 'gr\\udce4ph', which is not UTF-8; rename it"):
        named_after_graph(replace(Config(), dataset=small_graph.name), small_graph, None)


def test_a_resumed_run_of_an_earlier_version_keeps_its_name(small_graph, tmp_path):
    run(small_graph, folder=tmp_path / "run")
    stored = tmp_path / "run" / "config.yaml"
    stored.write_text(stored.read_text().replace(f"dataset: {OWN_GRAPH}", "dataset: digits"))
    assert run(small_graph, folder=tmp_path / "run", resume=True).config.dataset == "digits"
    assert run(small_graph, folder=tmp_path / "run", overwrite=True).config.dataset == OWN_GRAPH


def test_without_a_configuration_a_named_teacher_has_its_own_settings(small_graph, monkeypatch):
    monkeypatch.setattr(sys.modules["rbm.distillation.request"], "teacher_settings", {"gcn": QUICK}.get)
    expected = Config().updated(QUICK | {"dataset": OWN_GRAPH}).updated({"teacher": {"name": "gcn"}})
    assert run(small_graph, teacher="gcn", config=None).config == expected


def test_labels_among_the_methods_are_trained_once(small_graph, monkeypatch):
    calls, train = [], METHODS["labels"].train
    counted = replace(METHODS["labels"], train=lambda task: calls.append(1) or train(task))
    monkeypatch.setitem(METHODS, "labels", counted)
    assert list(run(small_graph, methods=["labels", "mlp"]).students) == ["labels", "mlp"]
    assert len(calls) == 1


def test_timings_tell_what_came_from_the_cache(small_graph, tmp_path):
    found = [run(small_graph, cache=tmp_path).timings for _ in range(2)]
    assert [[timings[name].get("cached") for name in ("teacher", "mlp", "labels")] for timings in found] == [
        [None, None, None],
        [True, None, True],
    ]


@pytest.mark.parametrize("watched", [True, False])
def test_progress_is_shown_where_somebody_looks(small_graph, monkeypatch, watched):
    shown = io.StringIO()
    options = {"file": shown, "force_terminal": watched, "width": 100}

    class Shown(Console):
        def __init__(self, quiet: bool = False, stderr: bool = True) -> None:
            super().__init__(quiet=quiet, **options)

    monkeypatch.setattr(progress, "Console", Shown)
    run(small_graph)
    assert ("best epoch" in shown.getvalue()) is watched
    before = shown.getvalue()
    run(small_graph, console=None)
    assert shown.getvalue() == before
