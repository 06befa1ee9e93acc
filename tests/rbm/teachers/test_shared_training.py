"""One training for splits that differ only in validation and test nodes: the cached results for each."""

from functools import partial

import pytest
import torch

from rbm.config import Config
from rbm.datasets.splits import halved, split_for, split_graph
from rbm.teachers.prepare import build_configured_teacher, cached_teacher, prepare_teacher, share_training
from rbm.utils.cache import Cache
from rbm.utils.progress import Progress
from rbm.utils.tensor_files import read_sealed


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{"name": "sage"}, {"name": "drgat"}, {"max_epochs": 9}])
def test_is_what_a_training_on_each_would_have_left(changes, precision, small_graph, tmp_path):
    # Random classes: validation accuracy fluctuates, and each split selects and stops at a different epoch.
    small_graph.y = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(0))
    teacher = {"hidden_channels": 8, "lr": 0.05, "patience": 4, "min_epochs": 1, "max_epochs": 60} | changes
    config = Config().updated({"teacher": teacher, "precision": precision})
    splits = [split_for(config, halved(small_graph, 3, half)) for half in range(4)]
    folders = {name: tmp_path / name for name in ("shared", "alone")}
    share_training(splits, 1, config, 3, Cache(folders["shared"]), Progress(None))
    prepare = partial(prepare_teacher, config=config, classes=3, run=None, progress=Progress(None))
    for split in splits:
        prepare(split=split, cache=Cache(folders["alone"]))
    names = sorted(file.name for file in folders["alone"].iterdir())
    assert len(names) == 4
    assert sorted(file.name for file in folders["shared"].iterdir()) == names
    results = []
    for name in names:
        (tensors, result), (expected, same) = (read_sealed(folders[which] / name) for which in folders)
        assert result == same
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], expected[key]) for key in tensors)
        results.append((result["best_epoch"], result["epochs"]))
    assert len(set(results)) > 1, "or a training that forgets whose epoch it keeps would pass"


def test_is_done_once(small_graph, tmp_path, monkeypatch):
    config = Config().updated({"teacher": {"hidden_channels": 8, "max_epochs": 3}})
    splits = [split_for(config, halved(small_graph, 3, half)) for half in range(2)]
    share_training(splits, 0, config, 3, Cache(tmp_path), Progress(None))
    monkeypatch.setattr("rbm.teachers.prepare.train_epoch", None)
    share_training(splits, 1, config, 3, Cache(tmp_path), Progress(None))
    with pytest.raises(TypeError):
        share_training(splits, 1, config.updated({"seed": 1}), 3, Cache(tmp_path), Progress(None))


def test_the_cache_knows_all_that_a_teacher_and_its_figures_depend_on(small_graph, tmp_path):
    trainings = []

    def trained(data, setting="transductive", classes=3, **changes) -> int:
        config = Config().updated({"setting": setting, **changes})
        split = split_graph(data, setting, unseen_fraction=0.4)
        teacher = build_configured_teacher(config, split, classes)
        train = lambda: trainings.append(None) or {}  # noqa: E731
        cached_teacher(teacher, split, config, classes, Cache(tmp_path), train, Progress(None))
        return len(trainings)

    assert trained(small_graph) == trained(small_graph.clone()) == 1
    for count, name in enumerate(("x", "y", "train_mask", "val_mask", "test_mask"), start=2):
        other = small_graph.clone()
        other[name] = other[name].roll(1, 0)
        assert trained(other) == count, name
    other = small_graph.clone()
    other.edge_index = other.edge_index[:, 1:]
    assert trained(other) == 7
    assert trained(small_graph, seed=1) == 8
    assert trained(small_graph, precision="bfloat16") == 9
    assert trained(small_graph, teacher={"lr": 0.02}) == 10
    assert trained(small_graph, classes=5) == 11

    # The observed graph stays the same, and accuracies on unseen nodes do not.
    unseen = split_graph(small_graph, "inductive", unseen_fraction=0.4).unseen_nodes
    assert trained(small_graph, "inductive") == 12
    other = small_graph.clone()
    other.y[unseen[0]] = (other.y[unseen[0]] + 1) % 3
    assert trained(other, "inductive") == 13
    other = small_graph.clone()
    other.edge_index = torch.cat([other.edge_index, unseen[:2, None]], dim=1)
    assert trained(other, "inductive") == 14
    other = small_graph.clone()
    other.x[unseen[0]] += 1
    assert trained(other, "inductive") == 15
