"""One training for splits that differ only in validation and test nodes: the cached results for each."""

from functools import partial

import pytest
import torch

from rbm.config import Config
from rbm.datasets.splits import halved, split_for
from rbm.teachers.prepare import prepare_teacher, share_training
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
    prepare = partial(prepare_teacher, None, config=config, classes=3, run=None, progress=Progress(None))
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
