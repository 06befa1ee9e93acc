"""The plots of one run and of several: the data that is drawn."""

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.colors import same_color
from matplotlib.image import imread

from rbm.distillation.report import pictures
from rbm.experiments import plots
from rbm.experiments.statistics import Summary
from rbm.utils import figures as drawing


@pytest.fixture
def figures(monkeypatch):
    """The figures in the order in which they were saved."""
    saved = []
    save = drawing.save

    def keep(figure, path):
        saved.append(figure)
        save(figure, path)

    monkeypatch.setattr(drawing, "save", keep)
    return saved


def assert_picture(path) -> None:
    picture = imread(path)
    assert picture.shape[0] > 300
    assert picture.shape[1] > 300
    assert picture.std() > 0.01, "nothing is drawn"


def record(phase: str, epoch: int, loss: float, val: float, test: float) -> dict:
    return {"phase": phase, "epoch": epoch, "loss": loss, "val_accuracy": val, "test_accuracy": test}


def test_training_curves(tmp_path, figures):
    records = [record("rbm", 2, 0.5, 0.8, 0.75), record("rbm", 1, 1.0, 0.4, 0.3)]
    records += [record("rbm", 3, 0.4, 0.8, 0.7), record("rbm", 4, 0.3, 0.6, 0.9)]
    records += [record("teacher", 1, 2.0, 0.5, 0.5)]
    path = tmp_path / "new" / "curves.png"
    pictures.plot_training_curves(records, path, titles={"rbm": "RbM student", "teacher": "Teacher"})
    assert_picture(path)
    loss, accuracy = figures[0].axes
    curve = next(line for line in loss.get_lines() if line.get_label() == "RbM student")
    assert curve.get_xydata().tolist() == [[1, 1.0], [2, 0.5], [3, 0.4], [4, 0.3]]
    # Of the two epochs with the best validation accuracy, the later one counts and gives the test accuracy.
    names = [text.get_text() for text in accuracy.get_legend().get_texts()]
    assert names == ["RbM student: test 70.0% at epoch 3", "Teacher: test 50.0% at epoch 1"]
    marks = [line.get_xydata()[0].tolist() for line in accuracy.get_lines() if line.get_marker() == "o"]
    assert [3, 0.8] in marks
    assert [3, 0.7] in marks


def test_a_steep_loss_is_drawn_on_a_logarithmic_axis(tmp_path, figures):
    flat = [record("mlp", epoch, 1.0 / epoch, 0.5, 0.5) for epoch in range(1, 5)]
    pictures.plot_training_curves(flat, tmp_path / "flat.png")
    pictures.plot_training_curves([*flat, record("mlp", 5, 0.001, 0.5, 0.5)], tmp_path / "steep.png")
    assert [figure.axes[0].get_yscale() for figure in figures] == ["linear", "log"]


def test_a_model_far_below_the_others_is_drawn(tmp_path, figures, recwarn):
    records = [record("labels", epoch, 1.0, 0.3, 0.2) for epoch in range(1, 4)]
    records += [record("mlp", epoch, 1.0, 1.0, 1.0) for epoch in range(1, 101)]
    pictures.plot_training_curves(records, tmp_path / "curves.png")
    low, high = figures[0].axes[1].get_ylim()
    assert low < 0.2 < 1.0 <= high
    assert not [warning for warning in recwarn if "constrained_layout" in str(warning.message)]


def test_bad_records(tmp_path):
    with pytest.raises(ValueError, match="records: got none"):
        pictures.plot_training_curves([], tmp_path / "none.png")


@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (2, 40)])
def test_expert_load(tmp_path, figures, shape):
    loads = torch.rand(shape, generator=torch.Generator().manual_seed(0)).softmax(dim=1)
    pictures.plot_expert_load(loads, tmp_path / "load.png")
    assert_picture(tmp_path / "load.png")
    assert figures[0].get_suptitle() == "Load of the experts"
    heights = [[bar.get_height() for bar in axes.patches] for axes in figures[0].axes]
    np.testing.assert_allclose(heights, loads.numpy(), rtol=1e-6)
    assert len({axes.get_ylim() for axes in figures[0].axes}) == 1, "layers are drawn on different scales"


def ticks(axis) -> list[tuple[float, str]]:
    low, high = sorted(axis.get_view_interval())
    shown = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    return [(place, label.get_text()) for place, label in shown if low <= place <= high]


def test_no_axis_goes_beyond_100_per_cent_and_no_tick_is_rounded(tmp_path, figures):
    pictures.plot_expert_load(torch.tensor([[0.97, 0.03], [0.125, 0.875]]), tmp_path / "load.png")
    records = [record("rbm", epoch, 1.0, 0.99, 1.0) for epoch in range(3)]
    pictures.plot_training_curves(records, tmp_path / "curves.png")
    accuracies = {"cora": {"a": Summary(99.5, 0.9, 3), "b": Summary(12.25, 0.1, 3)}}
    plots.plot_variants(accuracies, tmp_path / "variants.png")
    plots.plot_table({"cora": (accuracies["cora"], {"a": Summary(99.9, 0.4, 1)})}, tmp_path / "table.png")
    load, curves, variants, table = figures
    axes = [*((each.yaxis, 1.0) for each in load.axes), (curves.axes[1].yaxis, 1.0), (variants.axes[0].yaxis, 100.0)]
    for axis, whole in (*axes, (table.axes[0].xaxis, 100.0)):
        assert max(axis.get_view_interval()) <= whole
        found = ticks(axis)
        assert len(found) >= 3
        for place, label in found:
            assert float(label.removesuffix("%")) == pytest.approx(100 * place / whole, abs=1e-9)
    assert [label.get_text() for label in load.axes[1].get_xticklabels()] == ["0\n12.5", "1\n87.5"]


def test_a_table_has_a_panel_for_each_line(tmp_path, figures):
    """Each panel has its own axis: a common axis would compress the columns of a line."""
    lines = {f"graph {i}": ({"RbM": Summary(50.0 + i, 0.5, 3)}, {"RbM": Summary(51.0 + i, 0.0, 1)}) for i in range(6)}
    plots.plot_table(lines, tmp_path / "table.png", title="main")
    assert_picture(tmp_path / "table.png")
    panels = [axes for axes in figures[0].axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == list(lines)
    for i, axes in enumerate(panels):
        low, high = axes.get_xlim()
        assert low < 49.5 + i < 51 + i < high < low + 10
    with pytest.raises(ValueError, match="lines: got none"):
        plots.plot_table({}, tmp_path / "none.png")


def test_dollar_signs_in_names_are_no_mathematics(tmp_path, figures):
    broken = "a$5^{$b"
    plots.plot_variants({broken: {broken: Summary(60.0, 1.0, 2)}}, tmp_path / "variants.png")
    plots.plot_table({broken: ({broken: Summary(60.0, 1.0, 2)}, {})}, tmp_path / "table.png", title=broken)
    row = {"title": "Teacher", "p50_ms": 0.1, "p99_ms": 100.0}
    plots.plot_latency([{**row, "batch_size": size} for size in (1, 64)], tmp_path / "latency.png", title=broken)
    inputs = torch.randn(9, 4)
    pictures.plot_router_inputs(inputs, torch.arange(9), torch.arange(9), tmp_path / "tsne.png", title=broken)
    assert len(figures) == 4
    (axes,) = figures[2].axes
    assert [label.get_parse_math() for label in axes.get_yticklabels()[:1]] == [True], "a power of ten has its exponent"


def test_bad_load(tmp_path):
    with pytest.raises(ValueError, match=r"loads: got shape \[8\]"):
        pictures.plot_expert_load(torch.ones(8), tmp_path / "load.png")


def groups(axes) -> dict[str, np.ndarray]:
    return {points.get_label(): np.asarray(points.get_offsets()) for points in axes.collections}


def test_router_inputs_show_one_map_twice(tmp_path, figures):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    inputs = 20.0 * torch.eye(3)[labels] @ torch.randn(3, 6, generator=generator)
    inputs += torch.randn(60, 6, generator=generator)
    experts = labels.flip(0)
    pictures.plot_router_inputs(inputs, experts, labels, tmp_path / "tsne.png", title="rings, layer 2 of 2")
    assert_picture(tmp_path / "tsne.png")
    assert figures[0].get_suptitle() == "rings, layer 2 of 2"
    assert "all 60 nodes" in figures[0].get_supxlabel()
    for axes in figures[0].axes:
        assert "(no unit)" in axes.get_xlabel()
        assert len(axes.get_xticks()) > 2
    looks = [[(p.get_facecolor()[0], p.get_paths()[0].vertices.shape) for p in a.collections] for a in figures[0].axes]
    for color, marker in looks[0]:
        same = [shape for other, shape in looks[1] if same_color(color, other)]
        assert marker not in same, "an expert looks as a class does"
    by_expert, by_label = map(groups, figures[0].axes)
    assert {name: len(points) for name, points in by_expert.items()} == {"0": 20, "1": 20, "2": 20}
    everything = [np.sort(np.concatenate(list(by.values())), axis=0) for by in (by_expert, by_label)]
    np.testing.assert_array_equal(*everything)
    # Well-separated classes stay apart on the map: each point is nearest to the centre of its own class.
    centers = np.stack([by_label[str(label)].mean(axis=0) for label in range(3)])
    for label in range(3):
        distances = np.linalg.norm(by_label[str(label)][:, None] - centers, axis=2)
        assert (distances.argmin(axis=1) == label).all()


def test_router_inputs_repeat_and_are_thinned(tmp_path, figures):
    inputs = torch.randn(50, 70, generator=torch.Generator().manual_seed(0))
    for name in ("one", "two"):
        pictures.plot_router_inputs(inputs, torch.zeros(50), torch.arange(50) % 12, tmp_path / name, max_points=20)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert sum(map(len, groups(figures[0].axes[1]).values())) == 20


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_few_or_equal_or_long_router_inputs(tmp_path, figures, rows):
    for inputs in (torch.zeros(rows, 1), torch.ones(rows, 80), torch.randn(rows, 80), torch.randn(rows, 80) * 1e37):
        pictures.plot_router_inputs(inputs, torch.zeros(rows).long(), torch.arange(rows), tmp_path / "tsne.png")
        assert_picture(tmp_path / "tsne.png")
    for figure in figures:
        assert all(np.isfinite(points).all() for points in groups(figure.axes[1]).values())


def test_many_classes_keep_apart(tmp_path, figures):
    labels = torch.arange(15)
    pictures.plot_router_inputs(torch.randn(15, 4), labels, labels, tmp_path / "tsne.png")
    drawn = figures[0].axes[1].collections
    looks = [(point.get_facecolor()[0], point.get_paths()[0].vertices.shape) for point in drawn]
    for i, (color, marker) in enumerate(looks):
        assert not any(same_color(color, other) and marker == shape for other, shape in looks[:i])


@pytest.mark.parametrize(
    ("inputs", "experts", "message"),
    [
        (torch.ones(0, 3), torch.ones(0), r"inputs: got shape \[0, 3\]"),
        (torch.ones(4), torch.ones(4), r"inputs: got shape \[4\]"),
        (torch.ones(4, 2), torch.ones(3), r"top_expert: got shape \[3\], expected \[4\]"),
        (torch.tensor([[1.0], [torch.nan]]), torch.ones(2), r"inputs: 1 of 2 rows hold NaN .*the first is row 1"),
    ],
)
def test_bad_router_inputs(tmp_path, inputs, experts, message):
    with pytest.raises(ValueError, match=message):
        pictures.plot_router_inputs(inputs, experts, torch.ones(inputs.size(0)), tmp_path / "tsne.png")


def test_drawing_leaves_matplotlib_alone(tmp_path):
    from matplotlib import pyplot

    settings, open_figures = dict(matplotlib.rcParams), pyplot.get_fignums()
    pictures.plot_expert_load(torch.ones(1, 2) / 2, tmp_path / "load.png")
    assert dict(matplotlib.rcParams) == settings
    assert pyplot.get_fignums() == open_figures
