"""What methods share: encodings, computed for the sections that have some, and counted as time that a cache saves."""

import itertools

import pytest
import torch

from rbm.config import EncodingConfig
from rbm.datasets.splits import split_graph
from rbm.distillation import task
from rbm.training import time_limit as limits
from rbm.training.time_limit import time_limit
from rbm.utils.cache import Cache
from rbm.utils.progress import Progress
from rbm.utils.timings import Timings


def encoder_of(graph, setting="transductive", *, cache=None, extra=()) -> task.Encoder:
    return task.Encoder(split_graph(graph, setting), 3, 0, Cache(cache), [*extra], Progress(None), Timings())


def test_a_section_without_any_encoding_has_none(small_graph, monkeypatch):
    monkeypatch.setattr(task, "encode", lambda _, section, *__, **given: (section, given["extra"]))
    for deepwalk, label_propagation, extra in itertools.product(
        (False, True), (False, True), ([], [torch.ones(60, 1)])
    ):
        section = EncodingConfig(deepwalk=deepwalk, label_propagation=label_propagation)
        found = encoder_of(small_graph, extra=extra)(section)
        assert found == ((section, extra) if deepwalk or label_propagation or extra else None)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_a_cache_saves_a_later_run_the_walks_if_its_graph_has_no_other_nodes(
    small_graph, monkeypatch, tmp_path, setting, cached
):
    seconds = [0.0]
    monkeypatch.setattr(limits, "_clock", lambda: seconds[0])

    def encode(*_, advance, **__):
        for _ in range(10):
            seconds[0] += 1.0
            advance(20)

    monkeypatch.setattr(task, "encode", encode)
    with time_limit(1000.0, repeated=True) as limit:
        encoder_of(small_graph, setting, cache=tmp_path if cached else None)(EncodingConfig(walks_per_node=10))
    assert limit.reused == (10.0 if cached and setting == "transductive" else 0.0)
