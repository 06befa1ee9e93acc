"""The report of a run: its figures compared with an independent computation, its page in a browser, its failures."""

import itertools
import json
import os
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import browser, programs

import rbm
from rbm.config import Config
from rbm.distillation.report import charts, compare, experts, page, pictures, svg, tables
from rbm.distillation.report import observe as observing
from rbm.distillation.report.finished import read_distillation
from rbm.distillation.report.pictures import write_representation
from rbm.distillation.report.run_data import RunData

FEW = {"max_epochs": 4, "min_epochs": 0}
QUICK = {
    "encoding": {"deepwalk": False},
    "teacher": {**FEW, "hidden_channels": 8},
    "mlp": {**FEW, "hidden_channels": 8},
    "rbm": {**FEW, "hidden_channels": 8, "num_experts": 4, "top_k": 2, "pretrain_epochs": 2},
}


@pytest.fixture(scope="module")
def graph():
    """A graph of 240 nodes with overlapping classes, so that models err and disagree; one node has no neighbour."""
    from torch_geometric.data import Data

    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(240) % 3
    x = torch.randn(240, 6, generator=generator) + 1.2 * torch.nn.functional.one_hot(labels, 6)
    ends = torch.randint(0, 239, (2, 500), generator=generator)
    ends = ends[:, (labels[ends[0]] == labels[ends[1]]) | (torch.rand(500, generator=generator) < 0.3)]
    place = torch.arange(240)
    masks = {"train_mask": place < 60, "val_mask": (place >= 60) & (place < 120), "test_mask": place >= 120}
    return Data(x=x, edge_index=torch.cat([ends, ends.flip(0)], dim=1), y=labels, **masks)


@pytest.fixture(scope="module")
def made(graph, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    config = Config().updated(QUICK)
    return rbm.distill(graph, config=config, folder=folder, keep="rbm", plots=True), folder


def seen_of(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_figures_are_those_of_the_models(made):
    result, folder = made
    seen, nodes = seen_of(folder), result.split.graph.test_mask.nonzero().flatten()
    labels = result.split.graph.y[nodes].numpy()
    with torch.no_grad():
        logits = {name: student(result.student_inputs(name)) for name, student in result.students.items()}
    logits["teacher"] = result.teacher_logits
    assert set(seen["models"]) == {"teacher", "mlp", "rbm", "labels"}
    for name, found in seen["models"].items():
        chances = logits[name][nodes].softmax(1)
        sure, answers = (each.numpy() for each in chances.max(1))
        assert found["right"] == (answers == labels).sum()
        assert found["right"] / 120 == pytest.approx(result.summary[name]["test_accuracy"])
        matrix = np.zeros((3, 3), dtype=int)
        for label, answer in zip(labels, answers, strict=True):
            matrix[label, answer] += 1
        assert found["confusion"] == matrix.tolist()
        losses = torch.nn.functional.cross_entropy(logits[name][nodes], torch.from_numpy(labels))
        assert found["log_loss"] == pytest.approx(losses.item(), abs=1e-4)
        bins = [(sure > low) & (sure <= low + 0.1) for low in np.arange(0, 1, 0.1)]
        ece = sum(abs((answers == labels)[b].mean() - sure[b].mean()) * b.sum() for b in bins if b.any()) / 120
        assert found["ece"] == pytest.approx(ece, abs=1e-4)
    theirs, ours = (logits[name][nodes].argmax(1).numpy() for name in ("teacher", "rbm"))
    told = seen["disagreements"]
    assert told["count"] == (theirs != ours).sum() > 0
    assert {row[0] for row in told["rows"]} == set(nodes.numpy()[theirs != ours].tolist())
    sure = [row[5] for row in told["rows"]]
    assert sure == sorted(sure, reverse=True)
    quarters = (told["both_right"], told["student_right"], told["teacher_right"], told["both_wrong"])
    assert sum(quarters) == 120


def test_groups_hold_every_node_once(made, graph):
    _, folder = made
    seen = seen_of(folder)
    sources, targets = graph.edge_index
    joined = sources != targets
    alone = set(range(120, 240)) - set(targets[joined].tolist())
    assert 239 in alone
    assert sum(seen["degree"]["nodes"]) == 120
    assert seen["degree"]["nodes"][0] == len(alone)
    assert sum(seen["homophily"]["nodes"]) == 120 - seen["homophily"]["left_out"]
    assert seen["homophily"]["left_out"] == len(alone)
    for groups in (seen["degree"], seen["homophily"]):
        for right in groups["right"].values():
            assert all(0 <= hit <= count for hit, count in zip(right, groups["nodes"], strict=True))
    assert sum(seen["degree"]["right"]["rbm"]) == seen["models"]["rbm"]["right"]
    names = [observing._degree_name(int(group)) for group in observing._degree_group(np.array([0, 4, 5, 8, 9, 16, 17]))]
    assert names == ["0", "4", "5 to 8", "5 to 8", "9 to 16", "9 to 16", "17 to 32"]
    shares = observing._homophily_group(np.array([0.0, 0.19, 0.2, 0.6, 0.99, 1.0, np.nan]))
    assert shares.tolist() == [0, 0, 1, 3, 4, 5, -1]


def test_experts(made):
    result, folder = made
    found = seen_of(folder)["experts"]
    assert (found["method"], found["top_k"], len(found["layers"])) == ("rbm", 2, 2)
    with torch.no_grad():
        _, (routings, *_) = result.students["rbm"](result.student_inputs("rbm"), return_trace=True)
    for layer, routing in zip(found["layers"], routings, strict=True):
        load = torch.zeros(4).index_add_(0, routing.experts.flatten().long(), routing.gates.flatten()) / 240
        assert layer["load"] == pytest.approx(load.tolist(), abs=1e-4)
        assert layer["dead"] == [expert for expert in range(4) if not (routing.experts == expert).any()]
        assert layer["effective"] == pytest.approx(np.exp(-(load * load.clamp_min(1e-12).log()).sum().item()), abs=1e-2)
        assert [sum(row) for row in layer["by_class"]] == pytest.approx([1.0] * 3, abs=1e-4)
    assert len(found["space"]["memories"]) == 4


class _Page(HTMLParser):
    """The URLs that a page would fetch, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched, self.ids = [], []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids += [given["id"]] if "id" in given else []
        for name in ("src", "href", "xlink:href"):
            if not given.get(name, "#").startswith(("#", "data:")):
                self.fetched.append(given[name])


@pytest.mark.filterwarnings("error")
def test_the_plane_of_equal_or_long_rows():
    top, labels = torch.arange(9) % 2, torch.arange(9) % 3
    assert experts._plane(torch.ones(9, 4), top, labels, None, 0)["explained"] == [0.0, 0.0]
    rows = torch.randn(9, 4)
    short, long = (experts._plane(seen, top, labels, rows[:2], 0) for seen in (rows, rows * 1e37))
    np.testing.assert_allclose(long["points"], short["points"], atol=2e-4)


@pytest.mark.filterwarnings("error")
def test_figures_of_a_single_class():
    figures = observing.figures(np.ones((4, 1)), np.zeros(4, int), 1)
    assert figures["confusion"] == [[4]]
    assert figures["macro_f1"] == figures["balanced"] == 1


def test_the_page_stands_alone(made):
    _, folder = made
    text = (folder / "report.html").read_text()
    assert len(text) < 3 * 2**20
    page = _Page()
    page.feed(text)
    assert page.fetched == []
    assert len(page.ids) == len(set(page.ids)), "an id stands twice"
    left = set(re.findall(r"#0[0-9a-f]{5}\b", text)) & set(svg.VARIABLES)
    assert not left, "a stand-in colour is left"
    assert "own graph, transductive" in text
    phases = tables.configuration(RunData(folder)).grids[2].rows
    assert [row[0][0] for row in phases][-1] == "total", "the report's own time is a part of it"
    listed = json.loads((folder / "run.json").read_text())["files"]
    assert {"report.html", "report.json", "graph.safetensors", "training.png"} <= set(listed)


def test_sentences_on_models_that_are_alike_or_slow(made):
    run = RunData(made[1])
    run.accuracy["rbm"] = run.accuracy["teacher"]
    run.timings["rbm"]["one_node_ms"], run.timings["teacher"]["one_node_ms"] = 50.0, 0.25
    said = page.headline(run)
    assert said.endswith(", as many as its teacher, and needs 200.0 times the teacher's time for one node.")
    run.figures["behind_kept"] = {"mlp": {"difference": 0.0, "low": -0.1, "high": 0.1, "p": 1.0, "nodes": 120}}
    run.accuracy["teacher"] = (100.0, 99.0, 100.0)
    caption = page.sections(run)[0].charts[0].caption
    assert caption.startswith("Teacher has the highest accuracy, 100.0 %.")
    assert caption.endswith(" The difference of RbM student from MLP student may be chance.")
    groups = {"names": ["1", "2"], "nodes": [50, 70], "left_out": 0, "right": {"rbm": [50, 70], "teacher": [50, 70]}}
    assert tables.groups_sentence(run, groups, "degree") == (
        "RbM student is equally good everywhere (100.0 % correct), among groups with 10 nodes or more. Its teacher is"
        " as good as it in each of them."
    )


def test_runs_of_any_name_are_compared(made):
    runs = [RunData(made[1]), RunData(made[1])]
    runs[0].folder, runs[1].folder = Path("_first"), Path("second$^$")
    over_time = compare.sections(runs)[0].charts[1].svg
    assert all(f">RbM student of {name}</text>" in over_time for name in ("_first", "second$^$"))
    runs[0].folder, runs[1].folder = Path("/tmp/runs/first"), Path("/home/tmp/runs/first")
    assert compare.names(runs) == ["/tmp/runs/first", "home/tmp/runs/first"]


def test_figures_of_another_version_are_refused(made, tmp_path):
    (tmp_path / "report.json").write_text(json.dumps({**seen_of(made[1]), "format": 2}))
    with pytest.raises(ValueError, match=r"report.json has format 2, expected 1: .* remove it, and rbm report writes"):
        RunData(tmp_path)


def test_unlabelled_nodes_are_no_class(tmp_path, monkeypatch):
    space = {"points": [[0.0, 0.1, 0, 1], [0.2, 0.3, 1, -1]], "memories": [], "explained": [0.6, 0.4]}
    text = charts.space_chart(space, "class", "space")
    assert ">no label</text>" in text
    assert ">-1</text>" not in text
    drawn = []
    monkeypatch.setattr(pictures.figures, "save", lambda figure, _: drawn.append(figure))
    pictures.plot_router_inputs(torch.rand(8, 3), torch.arange(8) % 2, torch.arange(8) % 3 - 1, tmp_path / "map.png")
    assert [text.get_text() for text in drawn[0].axes[1].get_legend().get_texts()] == ["no label", "0", "1"]


def test_no_axis_beyond_100_per_cent_and_no_tick_rounded():
    figure, axes = svg.new_figure(2)
    svg.percent_axis(axes, "y", 87.5, 112.5)
    assert axes.get_ylim() == (87.5, 100)
    figure.draw_without_rendering()
    for place, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True):
        assert float(label.get_text()) == pytest.approx(place, abs=1e-9)
    axes.set_title("12.3456 <b>")
    text = svg.as_svg(figure, "one", 'a "label"')
    assert "12.3456 &lt;b&gt;" in text
    assert 'aria-label="a &quot;label&quot;"' in text


@pytest.mark.parametrize("groups", [3, 7, 9])
def test_labels_of_groups_and_experts_have_room(monkeypatch, groups):
    drawn = []
    monkeypatch.setattr(charts, "as_svg", lambda figure, *_: drawn.append(figure))
    names = [observing._degree_name(group) for group in range(9 - groups, 9)]
    found = {"names": names, "nodes": [1234] * groups, "right": {"mlp": [617] * groups}}
    charts.groups_chart(found, ["mlp"], {"mlp": ("MLP", "#010101", "o")}, "neighbours", "groups")
    layer = {"load": [1 / groups] * groups, "by_class": [[]] * 7, "dead": []}
    charts.load_chart(layer, 1, "load")
    for figure in drawn:
        figure.draw_without_rendering()
        labels = figure.axes[0].get_xticklabels()
        assert len(labels) == groups
        boxes = [label.get_window_extent() for label in labels]
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_rbm_report(made, command, tmp_path, monkeypatch):
    """For a run of an earlier version, whose models are run again; and for two runs on one page, one of them with given
    logits, which its folder does not contain.
    """
    result, folder = made
    before = (folder / "report.json").read_text()
    (folder / "report.json").unlink()
    other = tmp_path / "second"
    other.mkdir()
    for name in ("summary.json", "timings.json", "config.yaml", "metrics.jsonl"):
        (other / name).write_bytes((folder / name).read_bytes())
    found = observing.observe(replace(result, teacher_logits=None))
    assert "teacher" not in found["models"]
    assert found["disagreements"] is None
    (other / "report.json").write_text(json.dumps(found))
    monkeypatch.chdir(tmp_path)
    assert command("report", folder, other)[0] == 0
    assert json.loads(before) == seen_of(folder)
    text = (tmp_path / "report.html").read_text()
    assert "2 runs side by side" in text
    assert 'id="run1-disagreement"' in text
    assert 'id="run2-disagreement"' not in text
    assert "All settings are the same." in text
    status, _, error = command("report", folder, other)
    assert (status, "use --overwrite to replace it" in error) == (2, True)
    assert "expected each once" in command("report", folder, folder, "--out", "twice.html")[2]
    assert "holds no student.json" in command("report", tmp_path)[2]
    assert "ends in '.pdf', expected one of .html" in command("report", folder, "--out", "page.pdf")[2]
    monkeypatch.setattr("rbm.distillation.report.write.render", lambda folders: f"of {folders}")
    page = (folder / "report.html").read_text()
    assert not (folder / "representation.png").exists()
    assert command("report", folder, "--tsne")[0] == 0
    assert (folder / "representation.png").stat().st_size > 10_000
    assert "representation.png" in json.loads((folder / "run.json").read_text())["files"]
    alone = replace(result, students={"mlp": result.students["mlp"]})
    with pytest.raises(ValueError, match=r"no student of the run is a mixture \(got mlp\)"):
        write_representation(alone, folder)
    status, out, _ = command("report", folder)  # the page of a single run is its own and is replaced
    assert (status, "report.html" in out) == (0, True)
    assert (folder / "report.html").read_text() == f"of {[folder]}"
    (folder / "report.html").write_text(page)
    monkeypatch.setattr("os.access", lambda place, mode: place != folder or mode == os.R_OK)
    assert "no permission to write to" in command("report", folder)[2]


def test_brackets_in_the_name_of_a_run_are_no_markup(made, command, tmp_path):
    shutil.copytree(made[1], tmp_path / "[" / "bold]")
    status, out, error = command("report", tmp_path / "[" / "bold]", "--tsne")
    assert (status, "[/bold]/report.html" in out, error) == (0, True, "")


def test_a_finished_run_is_read_back(made):
    result, folder = made
    again = read_distillation(folder)
    assert again.method == "rbm"
    assert torch.equal(again.teacher_logits, result.teacher_logits)
    assert torch.equal(again.split.graph.x, result.split.graph.x)


def test_a_run_that_is_resumed_with_other_students_loses_the_report_of_the_former(made, graph, command, tmp_path):
    config, folder = Config().updated(QUICK), tmp_path / "run"
    shutil.copytree(made[1], folder)
    former = (folder / "report.json").read_bytes()
    rbm.distill(graph, config=config, keep="rbm", folder=folder, resume=True, plots=False)
    assert (folder / "report.json").read_bytes() == former, "the result is the same"
    rbm.distill(graph, config=config, methods=["mlp"], folder=folder, resume=True, plots=False)
    assert not any((folder / name).exists() for name in ("report.html", "training.png", "expert_load.png"))
    assert command("report", folder)[0] == 0
    assert seen_of(folder)["models"].keys() == {"teacher", "labels", "mlp"}
    (folder / "report.json").write_bytes(former)  # as earlier versions left it
    status, _, error = command("report", folder)
    assert (status, "resumed with other students since; remove it" in error) == (2, True)


def test_a_fault_of_the_report_leaves_the_run(graph, tmp_path, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no charts today\nand a second line")

    monkeypatch.setattr("rbm.distillation.report.write.render", broken)
    monkeypatch.setattr("rbm.distillation.report.pictures.write_plots", broken)
    config = Config().updated(QUICK)
    rbm.distill(graph, config=config, methods=["mlp"], labels_alone=False, folder=tmp_path / "run", plots=True)
    told = [record.getMessage() for record in caplog.records if record.name == "rbm"]
    assert len(told) == 2
    assert "report.html could not be written (RuntimeError: no charts today); the run is complete without" in told[1]
    assert rbm.load(tmp_path / "run")


def test_the_epoch_of_a_student_of_two_phases_is_marked_on_the_second(graph, tmp_path, monkeypatch, caplog):
    """SimMLP also counts the epochs of its alignment; its curve shows only those of its head."""
    marks = []
    curves = charts.curves_chart
    monkeypatch.setattr(charts, "curves_chart", lambda *given: marks.append(given[3]) or curves(*given))
    small = {"hidden_channels": 8, "predictor_channels": 8, "max_epochs": 3, "head_epochs": 5, "min_epochs": 0}
    config = Config().updated({**QUICK, "simmlp": small})
    run = tmp_path / "run"
    result = rbm.distill(graph, config=config, methods=["simmlp"], folder=run, plots=True)
    assert [record.getMessage() for record in caplog.records if record.name == "rbm"] == []
    assert (run / "training.png").is_file()
    assert result.summary["simmlp"]["epochs"] == 3 + 5
    assert result.summary["simmlp"]["best_epoch"] == 3 + marks[0]["simmlp"], marks
    assert result.summary["teacher"]["best_epoch"] == marks[0]["teacher"], "a model of one phase counts as it does"
    found = re.search(r"SimMLP is taken at epoch (\d+)", (run / "report.html").read_text())
    assert int(found[1]) == marks[0]["simmlp"] + 1


@pytest.mark.skipif(programs() is None, reason="needs Chromium and ChromeDriver (apt-get install chromium-driver)")
def test_in_a_browser(made, tmp_path):
    """No message on the console, every chart drawn, nothing wider than the window, and tables that sort."""
    _, folder = made
    with browser(tmp_path / "profile") as window:
        backgrounds = set()
        for scheme in ("light", "dark"):
            for width in (1280, 390):
                window.set_viewport(width, 900, scheme)
                window.open(folder / "report.html")
                assert window.messages() == []
                assert window.run("return innerWidth") == width
                assert window.run("return document.documentElement.scrollWidth") <= width
                boxes = window.run(
                    "return [...document.querySelectorAll('svg.chart')].map(s => {const b = s.getBoundingClientRect();"
                    "const drawn = [...s.querySelectorAll('path, use')].filter(p => p.getBBox().width > 0);"
                    "return [b.width, b.height, drawn.length, s.querySelectorAll('text').length,"
                    "getComputedStyle(s.querySelector('text')).fill]})"
                )
                assert len(boxes) == 16
                for wide, high, drawn, texts, _ in boxes:
                    assert wide > 250
                    assert high > 60
                    assert drawn > 3
                    assert texts > 3
                assert "rgb(0, 0, 0)" not in {fill for *_, fill in boxes}, "a text has no colour of the page"
            backgrounds.add(window.run("return getComputedStyle(document.body).backgroundColor"))
        assert len(backgrounds) == 2
        nodes = (
            "const t = document.querySelector('#run1-disagreement table');{}"
            "return [...t.tBodies[0].rows].map(r => Number(r.cells[0].textContent))"
        )
        click = "t.tHead.rows[0].cells[0].querySelector('button').click();"
        first = window.run(nodes.format(""))
        assert window.run(nodes.format(click)) == sorted(first, reverse=True)
        assert window.run(nodes.format(click)) == sorted(first)
