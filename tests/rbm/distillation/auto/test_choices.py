"""What the run after a search is asked for, when the search or the run is resumed."""

from unittest.mock import Mock

import pytest

import rbm
from rbm.distillation import distill as distill_module
from rbm.distillation.auto import folder

pytest.importorskip("optuna")


def distilled(graph, start, **options):
    return rbm.distill(graph, config=start, auto=True, budget=6, measure_latency=False, console=None, **options)


@pytest.mark.usefixtures("clock")
def test_a_search_is_continued_for_the_methods_that_it_was_started_with(small_graph, start, tmp_path):
    """Regression test: ``--resume --auto`` refused a search for one student if ``keep`` was not given again."""
    options = {"folder": tmp_path}
    first = distilled(small_graph, start, methods=["glnn", "rbm"], keep="rbm", **options)
    again = distilled(small_graph, start, resume=True, **options)
    assert (again.method, [*again.students], again.config) == ("rbm", ["glnn", "rbm", "labels"], first.config)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("ended", ["in its search", "before its run"])
def test_a_search_is_continued_with_the_same_choices(ended, small_graph, start, tmp_path, monkeypatch):
    """Regression test: ``keep="labels"`` and ``labels_alone`` were lost if the run had not begun."""
    options, error = {"methods": ["mlp"], "folder": tmp_path / "run"}, OSError("the disk is full")
    where = (folder.AutoFolder, "end") if ended == "in its search" else (distill_module, "check_inputs")
    for number, asked in enumerate(({"keep": "labels"}, {"labels_alone": False})):
        with monkeypatch.context() as patch:
            patch.setattr(*where, Mock(side_effect=error))
            with pytest.raises(OSError, match="the disk is full"):
                distilled(small_graph, start, **options, **asked, overwrite=number > 0)
        found = distilled(small_graph, start, resume=True, **{**options, "methods": None})
        assert [*found.students] == (["mlp"] if asked == {"labels_alone": False} else ["mlp", "labels"])
        assert found.method == asked.get("keep", "mlp")


@pytest.mark.usefixtures("clock")
def test_what_a_search_is_resumed_with_is_stored(small_graph, start, tmp_path, monkeypatch):
    options = {"methods": ["mlp"], "folder": tmp_path / "run"}
    with monkeypatch.context() as patch:
        patch.setattr(folder.AutoFolder, "end", Mock(side_effect=OSError("the disk is full")))
        for keep, resume in ((None, False), ("labels", True)):
            with pytest.raises(OSError, match="the disk is full"):
                distilled(small_graph, start, keep=keep, resume=resume, **options)
    assert distilled(small_graph, start, resume=True, **options).method == "labels"
