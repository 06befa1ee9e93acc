"""``rbm predict --graph``: new nodes are encoded by the rules that the evaluation applies to unseen nodes."""

import copy
import io

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

import rbm
from rbm.config import Config
from rbm.datasets.encodings import label_propagation, transfer
from rbm.datasets.registry import DATASETS, DatasetInfo
from rbm.serving.grown_graph import predict_graph

METHODS = ("rbm", "mlp", "nosmog", "cohop", "sign", "tined_plus", "trees", "glnn")
WALKS = {"walk_length": 5, "walks_per_node": 2, "embedding_dim": 4}
BRIEF = {"max_epochs": 2}
CONFIG = Config().updated(
    {
        **dict.fromkeys(("teacher", "mlp", "sign", "tined_plus", "trees", "glnn"), BRIEF),
        "nosmog": {**BRIEF, "encoding": WALKS},
        "tined_plus": {**BRIEF, "encoding": WALKS},
        "cohop": {**BRIEF, "rounds": 1},
        "rbm": {**BRIEF, "pretrain_epochs": 1, "hidden_channels": 8},
        "encoding": {**WALKS, "label_propagation": True},
    }
)


def trained(graph, folder, methods=METHODS, encodings=(), **changes):
    config = CONFIG.updated(changes)
    return rbm.distill(
        graph, config=config, methods=methods, folder=folder, encodings=encodings, measure_latency=False, plots=False
    )


def save(path, x, edges, **others):
    np.savez(path, x=x.numpy(), edges=edges.numpy(), **others)
    return path


def grown(graph, new=8):
    """The graph with new nodes, each joined to old ones and to other new ones; features and edges."""
    count = graph.num_nodes
    x = torch.cat([graph.x, torch.randn(new, graph.num_features)])
    nodes = torch.arange(count, count + new)
    old = torch.randint(0, count, (new,))
    pairs = torch.cat([torch.stack([old, nodes]), torch.stack([nodes[:-1], nodes[1:]])], dim=1)
    return x, torch.cat([graph.edge_index, pairs, pairs.flip(0)], dim=1)


@torch.inference_mode()
def answers(student, rows):
    return student(rows).softmax(-1).numpy()


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("transductive", {}),
        ("inductive", {}),
        ("inductive", {"encoding": {"relative_norm": 0.5}}),
        ("inductive", {"encoding": {"self_loops": True, "fill": "all_mean", "exclude_self": True}}),
        ("inductive", {"encoding": {"deepwalk": False}, "sign": {"hops": 0}, "cohop": {"histogram": "propagation"}}),
    ],
    ids=["seen", "unseen", "scaled", "self-loops", "labels-alone"],
)
def test_on_the_same_graph_the_predictions_are_those_of_the_evaluation(small_graph, tmp_path, setting, changes):
    result = trained(small_graph, tmp_path / "run", setting=setting, **changes)
    graph = save(tmp_path / "graph.npz", small_graph.x, small_graph.edge_index)
    for method, student in result.students.items():
        assert predict_graph(tmp_path / "run", graph, tmp_path / "out.npy", method=method) == 60
        expected = answers(student, result.student_inputs(method))
        np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-6, err_msg=method)


@pytest.fixture
def named(small_graph, monkeypatch):
    """The graph, which the name "tiny" loads."""
    info = DatasetInfo("tiny", "plugin", "60 nodes", loader=lambda root, seed: copy.copy(small_graph))
    monkeypatch.setitem(DATASETS, "tiny", info)
    return rbm.load_dataset("tiny")


@pytest.mark.parametrize("own", ["nothing", "fraction", "masks", "logits", "classes"])
def test_a_named_graph_is_that_of_training_with_a_split_of_its_own_too(named, tmp_path, own):
    """With logits or a number of classes of its own, it was not kept: `rbm report` and `--resume` did not find them."""
    if own == "masks":
        named.train_mask, named.val_mask = named.val_mask, named.train_mask
    elif own == "logits":
        named.teacher_logits = torch.randn(60, 3)
    elif own == "classes":
        named.num_classes = 5
    config, fraction = CONFIG.updated({"setting": "inductive"}), 0.7 if own == "fraction" else None
    options = {"methods": ["mlp"], "measure_latency": False, "plots": False, "unseen_fraction": fraction}
    result = rbm.distill(named, config=config, folder=tmp_path / "run", **options)
    assert (tmp_path / "run" / "graph.safetensors").exists() == (own not in ("nothing", "fraction"))
    graph = save(tmp_path / "graph.npz", named.x, named.edge_index)
    predict_graph(tmp_path / "run", graph, tmp_path / "out.npy")
    expected = answers(result.student, result.student_inputs("mlp"))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-6)


def test_a_name_that_loads_other_labels_than_the_run_had_is_told(named, tmp_path):
    trained(named, tmp_path / "run", ["mlp"])
    named.y[0] = (named.y[0] + 1) % 3  # of the graph that the name loads
    graph = save(tmp_path / "graph.npz", named.x, named.edge_index)
    with pytest.raises(ValueError, match="a graph with another y than its dataset 'tiny' has; name"):
        predict_graph(tmp_path / "run", graph, tmp_path / "out.npy")


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_new_nodes_count_labels_on_the_whole_graph_and_take_means_of_positions(small_graph, tmp_path, setting):
    own = torch.randn(60, 2)
    result = trained(small_graph, tmp_path / "run", ["mlp"], [own], setting=setting)
    x, edges = grown(small_graph)
    predict_graph(tmp_path / "run", save(tmp_path / "grown.npz", x, edges), tmp_path / "out.npy")
    seen, known = result.split.observed_nodes, result.encodings["mlp"].full
    labels = torch.cat([small_graph.y, torch.zeros(8, dtype=torch.int64)])
    mask = torch.cat([small_graph.train_mask, torch.zeros(8, dtype=torch.bool)])
    near = label_propagation(edges, labels, mask, 3)
    near[seen] = known[seen, 4:7]
    positions = transfer(known[seen, :4], seen, edges, 68)
    own = transfer(own, torch.arange(60), edges, 68)
    expected = answers(result.student, torch.cat([x, positions, near, own], dim=1))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-6)
    # The edges between new nodes matter: without them, some new nodes have no label nearby, or others.
    apart = edges[:, (edges < 60).any(dim=0)]
    predict_graph(tmp_path / "run", save(tmp_path / "apart.npz", x, apart), tmp_path / "apart.npy")
    assert not np.allclose(np.load(tmp_path / "apart.npy"), expected, atol=1e-4)


def test_new_nodes_of_sign_and_cohop(small_graph, tmp_path):
    result = trained(small_graph, tmp_path / "run", ["sign", "cohop"], sign={"hops": 2})
    x, edges = grown(small_graph)
    graph = save(tmp_path / "grown.npz", x, edges)
    predict_graph(tmp_path / "run", graph, tmp_path / "out.npy", method="sign")
    passed_on = rbm.load_encodings(tmp_path / "run", "sign", passed_on=True)
    hops = transfer(passed_on, torch.arange(60), edges, 68)
    hops[:60] = result.encodings["sign"].full
    expected = answers(result.students["sign"], torch.cat([x, hops], dim=1))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-6)
    predict_graph(tmp_path / "run", graph, tmp_path / "out.npy", method="cohop")
    # The last node's histogram, by hand: labelled nodes weighted by their distance.
    distances, frontier, reached = {67: 0}, [67], 0
    while frontier and reached < CONFIG.cohop.hops:
        reached += 1
        frontier = [int(u) for u, v in edges.T if int(v) in frontier and int(u) not in distances]
        distances.update(dict.fromkeys(frontier, reached))
    histogram = torch.zeros(3)
    for node, distance in distances.items():
        if node < 60 and small_graph.train_mask[node]:
            histogram += CONFIG.cohop.smoothing_radius**distance * F.one_hot(small_graph.y[node], 3)
    assert histogram.sum() > 0
    row = torch.cat([x[67], histogram / (histogram.sum() + 1e-6)])
    np.testing.assert_allclose(
        np.load(tmp_path / "out.npy")[67:], answers(result.students["cohop"], row[None]), atol=1e-5
    )


def test_nodes_are_found_by_their_ids(small_graph, tmp_path):
    pytest.importorskip("pyarrow")

    def write(folder, names, x, edges, labels=None):
        folder.mkdir()
        lines = [",".join(["id", *(f"f{i}" for i in range(12))])]
        lines += [",".join([name, *map(repr, row)]) for name, row in zip(names, x.tolist(), strict=True)]
        (folder / "x.csv").write_text("\n".join(lines))
        pairs = [f"{names[u]},{names[v]}" for u, v in edges.T.tolist()]
        (folder / "edges.csv").write_text("\n".join(["from,to", *pairs]))
        if labels is not None:
            rows = [f"{name},{label}" for name, label in zip(names, labels.tolist(), strict=True)]
            (folder / "y.csv").write_text("\n".join(["id,class", *rows]))
        return folder

    names = [f"node {i}" for i in range(68)]
    data = rbm.load_graph(write(tmp_path / "graph", names[:60], small_graph.x, small_graph.edge_index, small_graph.y))
    trained(data, tmp_path / "run", ["mlp"])
    x, edges = grown(small_graph)
    predict_graph(tmp_path / "run", write(tmp_path / "grown", names, x, edges), tmp_path / "out.npy")
    order = torch.randperm(68)
    place = order.argsort()
    mixed = write(tmp_path / "mixed", [names[i] for i in order], x[order], place[edges])
    assert predict_graph(tmp_path / "run", mixed, tmp_path / "mixed.npy") == 68
    np.testing.assert_allclose(np.load(tmp_path / "mixed.npy"), np.load(tmp_path / "out.npy")[order], atol=1e-6)
    predict_graph(tmp_path / "run", mixed, tmp_path / "mixed.csv")
    lines = (tmp_path / "mixed.csv").read_text().splitlines()
    assert lines[0] == "row,id,class,probability"
    assert [line.split(",")[1] for line in lines[1:]] == [names[i] for i in order]
    apart = write(tmp_path / "apart", [names[i] for i in order], x[order], place[small_graph.edge_index])
    console = Console(file=io.StringIO(), width=400)
    predict_graph(tmp_path / "run", apart, tmp_path / "apart.npy", console=console)
    new = [repr(names[i]) for i in order if i >= 60]
    assert "8 of 8 new nodes are near no node" in console.file.getvalue()
    assert f"zeros for encodings: nodes {', '.join(new)}\n" in console.file.getvalue(), "by their ids, without places"
    few = write(tmp_path / "few", names[3:], x[3:], edges[:, (edges >= 3).all(dim=0)] - 3)
    with pytest.raises(ValueError, match=r"lacks 3 of 60 nodes .*'node 0', 'node 1', 'node 2'"):
        predict_graph(tmp_path / "run", few, tmp_path / "out.npy")
    numbered = save(tmp_path / "grown.npz", x, edges)
    with pytest.raises(ValueError, match=r"nodes of the graph of .*run have ids, and those of .*grown\.npz do not"):
        predict_graph(tmp_path / "run", numbered, tmp_path / "out.npy")


def test_new_nodes_without_encodings_are_reported(run, small_graph, tmp_path, command):
    """Nodes 60 and 61 are isolated, 63 is joined to a new node only, and 62 to a node that training saw."""
    seen = int(torch.nonzero(small_graph.train_mask)[0])
    x = torch.cat([small_graph.x, torch.zeros(4, 12)])
    edges = torch.cat([small_graph.edge_index, torch.tensor([[seen, 62, 62, 63], [62, seen, 63, 62]])], dim=1)
    graph, out = save(tmp_path / "grown.npz", x, edges[:, :-2]), tmp_path / "out.npy"
    code, _, progress = command("predict", run, "--graph", graph, "--method", "mlp", "--out", out)
    assert code == 0
    assert "3 of 4 new nodes are near no node that training saw, and have zeros for encodings: nodes 60, 61, 63" in (
        " ".join(progress.split())
    )
    joined = save(tmp_path / "joined.npz", x[:63], edges[:, :-2])
    assert "2 of 3 new nodes" in command("predict", run, "--graph", joined, "--method", "mlp", "--out", out)[2]
    assert "new nodes" not in command("predict", run, "--graph", graph, "--method", "glnn", "--out", out)[2]


def test_the_file_of_the_runs_graph_may_grow(small_graph, tmp_path):
    """The run folder keeps the graph of training, since its file is the one that grows."""
    masks = {name: small_graph[name].numpy() for name in ("train_mask", "val_mask", "test_mask")}
    graph = save(tmp_path / "graph.npz", small_graph.x, small_graph.edge_index, y=small_graph.y.numpy(), **masks)
    trained(rbm.load_graph(graph), tmp_path / "run", ["mlp"], dataset=str(graph), setting="inductive")
    x, edges = grown(small_graph)
    assert predict_graph(tmp_path / "run", save(tmp_path / "grown.npz", x, edges), tmp_path / "expected.npy") == 68
    save(graph, x, edges)
    assert predict_graph(tmp_path / "run", graph, tmp_path / "out.npy") == 68
    assert (tmp_path / "out.npy").read_bytes() == (tmp_path / "expected.npy").read_bytes()


def test_predictions_do_not_replace_a_part_of_the_graph(run, small_graph, tmp_path):
    folder = tmp_path / "grown"
    folder.mkdir()
    np.save(folder / "x.npy", small_graph.x.numpy())
    np.save(folder / "edges.npy", small_graph.edge_index.numpy())
    for name in ("x.npy", "labels.csv"):
        with pytest.raises(ValueError, match="is a part of the graph"):
            predict_graph(run, folder, folder / name)
    assert predict_graph(run, folder, folder / "predictions.csv") == 60


def test_a_student_alone_is_refused(run, small_graph, tmp_path):
    rbm.load(run, quiet=True).save_pretrained(tmp_path / "alone")
    graph = save(tmp_path / "grown.npz", small_graph.x, small_graph.edge_index)
    with pytest.raises(ValueError, match=r"alone holds a student alone, .*name its run folder"):
        predict_graph(tmp_path / "alone", graph, tmp_path / "out.npy")


def test_an_undirected_graph_gets_its_reverse_edges(small_graph, tmp_path):
    once = small_graph.edge_index[:, small_graph.edge_index[0] < small_graph.edge_index[1]]
    masks = {name: small_graph[name].numpy() for name in ("train_mask", "val_mask", "test_mask")}
    save(tmp_path / "graph.npz", small_graph.x, once, y=small_graph.y.numpy(), **masks)
    config = CONFIG.updated({"dataset": str(tmp_path / "graph.npz"), "undirected": True, "setting": "inductive"})
    data = rbm.load_graph(tmp_path / "graph.npz", undirected=True)
    result = rbm.distill(data, config=config, methods=["mlp"], folder=tmp_path / "run", measure_latency=False)
    predict_graph(tmp_path / "run", tmp_path / "graph.npz", tmp_path / "out.npy")
    np.testing.assert_allclose(
        np.load(tmp_path / "out.npy"), answers(result.student, result.student_inputs()), atol=1e-6
    )


@pytest.fixture
def run(small_graph, tmp_path):
    trained(small_graph, tmp_path / "run", ["mlp", "glnn"], setting="inductive")
    (tmp_path / "out.npy").write_bytes(b"earlier")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, edges: (x[:59], edges[:, (edges < 59).all(dim=0)]), r"has 59 nodes, and that of .*run has 60"),
        (lambda x, edges: (x[torch.randperm(60)], edges), r"of 60 nodes of the graph of .*run have other features"),
        (lambda x, edges: (x[:, :11], edges), r"has 11 features, and the student of .*run takes 12"),
        (
            lambda x, edges: (x.index_fill(0, torch.tensor([3]), torch.nan), edges),
            r"^graph: .*other\.npz, x: 1 of 60 nodes have NaN or infinite features \(node 3\)",
        ),
        (lambda x, edges: (x, edges + 60), r"^graph: .*other\.npz, edge_index holds node ids from 60"),
    ],
    ids=["fewer-nodes", "another-order", "another-width", "nan", "edges-out-of-range"],
)
def test_another_graph_is_refused(run, small_graph, tmp_path, change, message):
    graph = save(tmp_path / "other.npz", *change(small_graph.x, small_graph.edge_index))
    with pytest.raises(ValueError, match=message):
        predict_graph(run, graph, tmp_path / "out.npy", method="mlp")
    assert (tmp_path / "out.npy").read_bytes() == b"earlier"


def test_messages_on_the_files_of_the_graph_name_the_argument(run, small_graph, tmp_path, caplog):
    with pytest.raises(FileNotFoundError, match=r"^graph: .*nowhere\.npz does not exist"):
        predict_graph(run, tmp_path / "nowhere.npz", tmp_path / "out.npy")
    once = small_graph.edge_index[:, small_graph.edge_index[0] < small_graph.edge_index[1]]
    predict_graph(run, save(tmp_path / "once.npz", small_graph.x, once), tmp_path / "out.npy", method="mlp")
    assert "graph: " in caplog.messages[0]
    assert "undirected, add the reverse of each edge to the file." in caplog.messages[0], "there is no --undirected"
    rbm.load_graph(save(tmp_path / "y.npz", small_graph.x, once, y=small_graph.y.numpy()))
    assert caplog.messages[-1].startswith("dataset: "), "as before"


def test_changed_features_are_reported(run, small_graph, tmp_path, caplog):
    x = small_graph.x.clone()
    x[[4, 9]] += 1
    graph = save(tmp_path / "changed.npz", x, small_graph.edge_index)
    predict_graph(run, graph, tmp_path / "out.npy", method="mlp")
    assert "2 of 60 nodes of the graph of" in caplog.text


def test_a_search_on_validation_nodes_is_refused(small_graph, tmp_path):
    trained(small_graph, tmp_path / "run", ["mlp"], evaluate_on="validation")
    graph = save(tmp_path / "graph.npz", small_graph.x, small_graph.edge_index)
    with pytest.raises(ValueError, match="was evaluated on validation nodes"):
        predict_graph(tmp_path / "run", graph, tmp_path / "out.npy")


def test_the_command(run, small_graph, tmp_path, command):
    x, edges = grown(small_graph)
    graph, out = save(tmp_path / "grown.npz", x, edges), tmp_path / "out.csv"
    code, printed, _ = command("predict", run, "--graph", graph, "--out", out)
    assert code == 0
    assert "68 predictions written to" in printed
    assert len(out.read_text().splitlines()) == 69
    assert command("predict", run, "--graph", graph, "--method", "glnn", "--out", out)[0] == 0, "features alone"
    for extra, message in (
        ([graph, "--graph", graph], "together with features"),
        (["--graph", graph, "--nodes", "all"], "together with nodes"),
        ([], "features: got none"),
        ([graph, "--root", tmp_path], "root: got"),
        (["--graph", graph, "--out", graph], "expected one of .csv, .npy, .parquet"),
    ):
        code, _, error = command("predict", run, *extra)
        assert code != 0
        assert message in error


def test_a_finished_run_is_not_resumed_on_a_graph_that_has_grown(run, small_graph):
    kept = (run / "graph.safetensors").read_bytes()
    more = small_graph.clone()
    more.edge_index = more.edge_index[:, :-2]
    with pytest.raises(
        ValueError, match=r"was made on a graph of \d+ edges, and the graph now has .*rbm predict --graph"
    ):
        rbm.distill(
            more, config=CONFIG.updated({"setting": "inductive"}), methods=["mlp", "glnn"], folder=run, resume=True
        )
    assert (run / "graph.safetensors").read_bytes() == kept
