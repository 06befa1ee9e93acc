"""A run is resumed on the graph, teacher and encodings that it was started with, finished or not."""

import json

import pytest
import torch

import rbm
from rbm.datasets.readers.node_ids import IDS, NodeIds


@pytest.fixture(scope="module")
def quick():
    return rbm.Config().updated(
        {
            "teacher": {"max_epochs": 2},
            "rbm": {"max_epochs": 2},
            "encoding": {"deepwalk": False},
            "setting": "inductive",
        }
    )


def changed(graph, part):
    """The arguments of a run on ``graph``, and those of its resumption with another ``part``."""
    logits = torch.randn(graph.num_nodes, int(graph.y.max()) + 1)
    columns = torch.rand(graph.num_nodes, 2)
    first, second = [{"data": graph.clone(), "teacher": logits, "encodings": [columns]} for _ in range(2)]
    if part == "teacher":
        second["teacher"] = logits + 1
    elif part == "encodings":
        second["encodings"] = [columns + 1]
    elif part == "unseen_fraction":
        second["unseen_fraction"] = 0.5
    elif part == "x":
        second["data"].x = graph.x + 1
    elif part == "edge_index":
        second["data"].edge_index = graph.edge_index.flip(1)
    elif part == "y":
        second["data"].y = graph.y.flip(0)
    else:
        second["data"][part] = graph[part] & (graph[part].cumsum(0) > 1)  # without its first node
    return first, second


@pytest.mark.parametrize(
    "part", ["x", "edge_index", "y", "train_mask", "val_mask", "teacher", "encodings", "unseen_fraction"]
)
def test_an_unfinished_run_is_not_resumed_on_other_inputs(small_graph, quick, tmp_path, part):
    first, second = changed(small_graph, part)
    options = {"config": quick, "methods": ["rbm"], "folder": tmp_path / "run", "labels_alone": False, "console": None}
    done = rbm.distill(**first, **options)
    (tmp_path / "run" / "summary.json").unlink()
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").glob("[!.]*")}
    with pytest.raises(ValueError, match=rf"was started with another {part}; resume with the same"):
        rbm.distill(**second, **options, resume=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").glob("[!.]*")} == before
    assert rbm.distill(**first, **options, resume=True).summary == done.summary


def test_a_run_with_a_teacher_of_ones_own_is_not_resumed_without(small_graph, quick, tmp_path):
    first, _ = changed(small_graph, "teacher")
    options = {"config": quick, "methods": ["mlp", "rbm"], "folder": tmp_path / "run", "console": None}
    rbm.distill(**first, **options)
    message = "started from Python with teacher and encodings of your own, and is resumed without; .* by --method"
    with pytest.raises(ValueError, match=message):
        rbm.distill(small_graph, **options, resume=True, keep="rbm")


def test_a_module_is_known_by_its_weights(small_graph, quick, tmp_path):
    class Linear(torch.nn.Linear):
        def forward(self, x, edge_index):
            return super().forward(x)

    options = {"config": quick, "methods": ["rbm"], "folder": tmp_path / "run", "labels_alone": False, "console": None}
    teacher = Linear(small_graph.num_features, int(small_graph.y.max()) + 1)
    rbm.distill(small_graph, teacher, **options)
    rbm.distill(small_graph, teacher, **options, resume=True)
    torch.nn.init.normal_(teacher.weight)
    with pytest.raises(ValueError, match="was started with another teacher;"):
        rbm.distill(small_graph, teacher, **options, resume=True)


def test_a_run_of_an_earlier_version_gets_hashes_when_it_is_resumed(small_graph, quick, tmp_path):
    options = {"config": quick, "methods": ["rbm"], "folder": tmp_path / "run", "labels_alone": False, "console": None}
    rbm.distill(small_graph, **options)
    stored = tmp_path / "run" / "inputs.json"
    known = json.loads(stored.read_text())
    assert {"x", "edge_index", "y", "train_mask", "val_mask", "test_mask"} <= known.keys()
    stored.unlink()
    rbm.distill(small_graph, **options, resume=True)
    assert json.loads(stored.read_text()) == known


def test_a_run_is_not_resumed_with_other_ids(small_graph, quick, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    names = [f"user_{number}" for number in range(small_graph.num_nodes)]
    graph, other = small_graph.clone(), small_graph.clone()
    for data, texts in ((graph, names), (other, names[::-1])):
        data.node_ids = NodeIds(pyarrow.array(texts), tmp_path)
    options = {"config": quick, "methods": ["rbm"], "folder": tmp_path / "run", "labels_alone": False, "console": None}
    rbm.distill(graph, **options)
    with pytest.raises(ValueError, match="was started with another node_ids; resume with the same"):
        rbm.distill(other, **options, resume=True)
    rbm.distill(graph, **options, resume=True)
    # An earlier version stored no checksum of them.
    path = tmp_path / "run" / "inputs.json"
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != IDS}))
    rbm.distill(graph, **options, resume=True)


def test_an_attribute_that_is_called_as_ids_are(small_graph, quick, tmp_path):
    small_graph.node_ids = torch.arange(small_graph.num_nodes)
    rbm.distill(small_graph, config=quick, methods=["rbm"], folder=tmp_path / "run", console=None)
    assert not (tmp_path / "run" / "node_ids.csv").exists()


def test_a_resumed_run_has_its_own_methods_and_keeps_the_named_one(small_graph, quick, tmp_path):
    """Regression test: Python trained mlp and rbm unless the methods were given again, and ``keep`` was lost."""
    options = {"config": quick.updated({"glnn": {"max_epochs": 2}}), "folder": tmp_path / "run", "console": None}
    first = rbm.distill(small_graph, methods=["glnn", "rbm"], **options)
    other = next(method for method in ("glnn", "rbm") if method != first.method)
    for keep in (other, None):
        again = rbm.distill(small_graph, keep=keep, resume=True, **options)
        assert [*again.students] == ["glnn", "rbm", "labels"]
        assert again.method == other
    assert [*rbm.distill(small_graph, methods=["glnn"], resume=True, **options).students] == ["glnn", "labels"]
    assert [*rbm.distill(small_graph, overwrite=True, **options).students] == ["mlp", "rbm", "labels"]


def test_a_run_without_the_mlp_on_labels_is_resumed_without(small_graph, quick, tmp_path):
    """Regression test: the resumed run trained that MLP too, and other students could learn from it."""
    options = {"config": quick, "methods": ["mlp"], "folder": tmp_path / "run", "console": None}
    rbm.distill(small_graph, labels_alone=False, **options)
    for given, expected in ((None, False), (True, True), (None, True), (False, False), (None, False)):
        found = rbm.distill(small_graph, labels_alone=given, resume=True, **options)
        assert ("labels" in found.students) is expected
