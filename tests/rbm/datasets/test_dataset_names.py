"""Names of datasets: aliases, those of plugins, short ones for titles, and the settings of each."""

from pathlib import Path

import pytest
import yaml

import rbm.datasets
from rbm.datasets import DATASETS, DatasetInfo, dataset_name, find_dataset, load_dataset
from rbm.datasets.registry import graph_name, is_path, short_name

CONFIGS = Path(rbm.datasets.__file__).parents[1] / "config" / "configs" / "paper"


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("Cora", "cora"),
        ("CITESEER", "citeseer"),
        ("photo", "amazon-photo"),
        ("Amazon_Computers", "amazon-computers"),
        ("coauthor-cs", "academic-cs"),
        ("Physics", "academic-physics"),
    ],
)
def test_aliases(alias, name):
    assert find_dataset(alias) is DATASETS[name]


@pytest.mark.parametrize("name", ["my_graph", "My graph", "MY-GRAPH"])
def test_a_plugin_may_write_a_name_in_any_way(monkeypatch, name):
    for known in ("my_graph", "My-Graph"):
        added = DatasetInfo(known, "own", "")
        monkeypatch.setattr(rbm.datasets.registry, "DATASETS", {**DATASETS, known: added})
        assert find_dataset(name) is added
        assert not is_path(name)


@pytest.mark.parametrize(
    ("dataset", "name"),
    [("cora", "cora"), ("data/wiki.pt", "wiki"), ("b.npz", "b"), ("data/wiki.2020", "wiki.2020"), (".", ".")],
)
def test_short_names(dataset, name):
    assert short_name(dataset) == name


@pytest.mark.parametrize(
    ("dataset", "name"),
    [("/data/wiki.pt", "wiki"), ("/data/wiki", "wiki"), ("data/b.npz", "b"), ("org/wiki", "org/wiki"), ("a.b", "a.b")],
)
def test_the_name_of_a_runs_graph(dataset, name):
    """Regression test: of org/wiki, only wiki was shown."""
    assert graph_name(dataset) == name


def test_unknown_name_lists_the_known_and_the_closest():
    with pytest.raises(
        ValueError, match=r"dataset: got 'coora', expected one of digits, cora, .*did you mean 'cora'\?"
    ):
        load_dataset("coora")
    with pytest.raises(TypeError, match="dataset: got int"):
        load_dataset(3)


def test_every_dataset_has_hyperparameters_that_are_numbers():
    names = {path.stem for path in CONFIGS.glob("*.yaml")}
    assert names == set(DATASETS) - {"digits"} | {"ogbn-arxiv", "ogbn-products"}

    def leaves(tree, path):
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from leaves(value, (*path, key))
            else:
                yield (*path, key), value

    for name in names:
        config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
        assert set(config) == {"transductive", "inductive"}
        found = dict(leaves(config, ()))
        assert found[("transductive", "sage", "rbm", "student", "top_k")] in (2, 3)
        for path, value in found.items():
            assert isinstance(value, str) == (path[-1] == "norm"), (name, path, value)


def test_what_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "cora").mkdir()
    paths = ("mine", "./cora", "a/b", "a\\b", "graph.pt", "graph.pth", "graph.npz", Path("cora"))
    assert [name for name in paths if not is_path(name)] == []
    assert [name for name in ("cora", "Photo", "ogbn_arxiv", "yours", "", " ", 3) if is_path(name)] == []


def test_name_of_a_dataset():
    assert dataset_name("Coauthor_CS") == "academic-cs"
    assert dataset_name("./my graphs/a.npz") == "./my graphs/a.npz"
    assert dataset_name(Path("a") / "b") == "a/b"
    assert dataset_name(Path("Cora")) == "./Cora", "a folder is not the known graph"
    with pytest.raises(ValueError, match=r"dataset: got 'coora', expected one of digits, .*, or a file or folder"):
        dataset_name("coora")
    with pytest.raises(ValueError, match="dataset: got '', expected one of"):
        dataset_name("")
