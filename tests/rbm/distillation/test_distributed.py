"""Distributed training: the same numbers as in one process, no rank that hangs, one report, one run folder."""

import pytest
import torch
from student_ranks import CASES, CASES_OF_THREE, reset_experts, run_all, run_cases, spawn, train_layer

from rbm import FusedRbMLayer
from rbm.cli.distillation import distill_seeds
from rbm.training.run_folder import load_student, read_metrics
from rbm.utils.distributed import joined

# Starting processes and importing takes longer than training.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(one_thread):
    """The results of one process."""
    return run_cases(lambda: None)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The results of two processes, and the folder of their complete runs."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, spawn(2, run_all, tmp_path_factory.mktemp("ranks"), folder)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return spawn(3, run_cases, tmp_path_factory.mktemp("ranks"), CASES_OF_THREE)


@pytest.fixture(params=[*((2, case) for case in CASES), *((3, case) for case in CASES_OF_THREE)], ids=str)
def together(request):
    """A case, and the results of each of several processes."""
    ranks, case = request.param
    if ranks == 3:
        return case, [cases[case] for cases in request.getfixturevalue("three")]
    return case, [result["cases"][case] for result in request.getfixturevalue("two")[1]]


def test_ranks_come_to_what_one_process_comes_to(alone, together):
    case, outcomes = together
    expected = alone[case]
    assert len({round(loss, 9) for loss in expected.losses}) == len(expected.losses), "every epoch changed something"
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-6)
        assert outcome.accuracies == expected.accuracies
        assert outcome.state.keys() == expected.state.keys()
        for name, value in expected.state.items():
            torch.testing.assert_close(outcome.state[name], value, rtol=1e-6, atol=1e-6, msg=f"{case}: {name}")


def test_ranks_hold_the_same_bits(together):
    _, (first, *others) = together
    for other in others:
        assert all(torch.equal(first.state[name], other.state[name]) for name in first.state)


@pytest.fixture(scope="module")
def runs(two):
    folder, ranks = two
    return folder, [result["run"] for result in ranks]


def test_a_run_has_one_folder_and_one_result(runs):
    folder, (first, second) = runs
    assert first["summary"] == second["summary"]
    assert all(torch.equal(first["state"][name], second["state"][name]) for name in first["state"])
    kept = load_student(folder / "whole").state_dict()
    assert all(torch.equal(kept[name], first["state"][name]) for name in kept)
    records = [(record["phase"], record["epoch"]) for record in read_metrics(folder / "whole")]
    assert len(set(records)) == len(records), "only one rank writes"
    assert {phase for phase, _ in records} == {"teacher", "glnn", "mlp", "rbm", "labels"}


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(runs):
    _, ranks = runs
    for rank in ranks:
        assert rank["resumed summary"] == rank["summary"]
        assert all(torch.equal(rank["resumed state"][name], value) for name, value in rank["state"].items())


def test_the_first_rank_tells_a_mistake_for_all(runs):
    _, (first, second) = runs
    assert not first["reported by rank 0"]
    assert second["reported by rank 0"]


def test_a_layer_whose_parameters_are_sharded(two):
    _, ranks = two
    expected = train_layer(lambda layer: layer)
    for result in ranks:
        assert result["sharded"].keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(result["sharded"][name], value, msg=name)


def test_dead_experts_of_sharded_layers_are_reset(two):
    """An assignment to one expert of a sharded parameter, or to the gathered parameter of a forward, has no effect."""
    _, ranks = two
    expected = reset_experts(lambda model: model)
    assert expected["found"].keys() == {"1", "2"}
    for state in (state for result in ranks for state in result["reset"]):
        assert state["found"] == expected["found"]
        for name in expected.keys() - {"found"}:
            torch.testing.assert_close(state[name], expected[name], msg=name)


def test_a_scale_saved_as_a_scalar_is_loaded():
    layer, state = FusedRbMLayer(6, 4, 5, 2), FusedRbMLayer(6, 4, 5, 2, init_scale=3.0).state_dict()
    layer.load_state_dict({**state, "log_scale": state["log_scale"].squeeze()})
    assert torch.equal(layer.log_scale, state["log_scale"])


def test_several_seeds_are_refused_under_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"seeds is '0-3' in 2 processes of torchrun.*leave torchrun out"):
        distill_seeds("0-3", ["rbm"], None, None, None, 1, None, ())


def test_more_processes_than_gpus_are_refused(monkeypatch):
    for name, value in {"WORLD_SIZE": "9", "LOCAL_RANK": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with (
        pytest.raises(ValueError, match="process 8 of this machine has no GPU of its own, there are 8"),
        joined("cuda"),
    ):
        pass


def test_one_process_joins_nothing(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined("cpu") as device:
        assert device == "cpu"
        assert not torch.distributed.is_initialized()
