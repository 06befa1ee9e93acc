"""The reliability of soft labels."""

import pytest
import torch
from torch import nn
from torch_geometric.data import Data

from rbm.config import ReliabilityConfig
from rbm.distillation.reliability import Reliability, fit_power
from rbm.teachers.outputs import TeacherOutputs, entropy_change


class OwnFeatures(nn.Module):
    """A teacher whose output for a node depends only on the node's features, more for some nodes than for others."""

    def __init__(self, strength: torch.Tensor) -> None:
        super().__init__()
        self.strength = strength
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.dropout(x) * self.strength[:, None]


@pytest.fixture
def graph() -> Data:
    return Data(x=torch.randn(40, 3), edge_index=torch.empty(2, 0, dtype=torch.int64))


def test_entropy_change_follows_its_definition(graph):
    teacher = OwnFeatures(torch.linspace(0.1, 2.0, 40)).train()
    change = entropy_change(teacher, graph, noise_std=0.5, num_samples=2, squared=True, seed=3)
    assert teacher.training, "left as it was"

    generator = torch.Generator().manual_seed(3)
    entropy = lambda x: torch.distributions.Categorical(logits=x * teacher.strength[:, None]).entropy()  # noqa: E731
    noises = [torch.empty(40, 3).normal_(0.0, 0.5, generator=generator) for _ in range(2)]
    expected = sum((entropy(graph.x + noise) - entropy(graph.x)) ** 2 for noise in noises)
    torch.testing.assert_close(change, expected / expected.max(), rtol=1e-4, atol=1e-5)
    assert change.max() == 1


def test_a_teacher_that_draws_random_numbers_does_not_change_those_of_students(graph):
    """Regression test: DRGAT draws in eval mode, so a student depended on which methods were trained before it."""

    class Drawing(OwnFeatures):
        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return super().forward(x, edge_index) * torch.rand_like(x)

    teacher, state = Drawing(torch.linspace(0.1, 2.0, 40)), torch.get_rng_state()
    change = entropy_change(teacher, graph, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(entropy_change(teacher, graph, seed=3), change)


def test_a_teacher_has_a_change_for_each_noise_and_seed(graph):
    teacher, unused = OwnFeatures(torch.linspace(0.1, 2.0, 40)), torch.zeros(40, 3)
    outputs = TeacherOutputs(unused, unused, {}, teacher, graph)
    for noise in ({}, {"noise_std": 0.5}, {"num_samples": 2}, {"squared": True}):
        for seed in (0, 1):
            expected = entropy_change(teacher, graph, **noise, seed=seed)
            assert torch.equal(outputs.entropy_change(ReliabilityConfig(**noise), seed), expected)


def test_sparse_features_give_the_change_of_dense_ones(graph):
    teacher = OwnFeatures(torch.ones(40))
    graph.x = graph.x * (torch.rand(40, 3) < 0.5)
    dense = entropy_change(teacher, graph)
    graph.x = graph.x.to_sparse_csr()
    torch.testing.assert_close(entropy_change(teacher, graph), dense)


def test_a_teacher_that_nothing_disturbs_is_trusted(graph):
    change = entropy_change(OwnFeatures(torch.zeros(40)), graph)
    assert change.tolist() == [0.0] * 40


@pytest.mark.parametrize("power", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("ignore_empty_bins", [False, True])
def test_fit_reproduces_a_known_power(power, ignore_empty_bins):
    change = torch.rand(200_000, dtype=torch.float64)
    agree = torch.rand(200_000) < 1 - change**power
    fitted = fit_power(change, agree, bin_offset="center", ignore_empty_bins=ignore_empty_bins)
    assert fitted == pytest.approx(power, rel=0.08)


@pytest.mark.parametrize(("bin_offset", "shift"), [("center", 0.125), ("released", 0.05)])
def test_fit_of_a_few_nodes_by_hand(bin_offset, shift):
    """Four bins with shares 1, 2 / 3, 1 / 2 and 1 / 4; the last is rescaled to zero."""
    change = torch.tensor([0.1, 0.3, 0.4, 0.45, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95])
    agree = torch.tensor([True, True, True, False, True, False, True, False, False, False])
    x, shares = torch.arange(4) / 4 + shift, (torch.tensor([1, 2 / 3, 1 / 2, 1 / 4]) - 1 / 4) / (3 / 4)
    powers = torch.linspace(0.1, 3, 29_001, dtype=torch.float64)
    errors = (1 - x.double() ** powers[:, None] - shares).square().sum(1)
    for ignore_empty_bins in (False, True):
        how = {"num_bins": 4, "bin_offset": bin_offset, "ignore_empty_bins": ignore_empty_bins}
        assert fit_power(change, agree, **how) == pytest.approx(powers[errors.argmin()].item(), abs=2e-4)


@pytest.mark.parametrize("ignore_empty_bins", [False, True])
def test_only_bins_without_nodes_are_ignored(ignore_empty_bins):
    """Five bins with shares 1, none, 1 / 2, 0 and 0; in the last two, nodes disagree."""
    change = torch.tensor([0.1, 0.5, 0.5, 0.7, 0.9])
    agree = torch.tensor([True, True, False, False, False])
    x, shares = torch.arange(5) / 5 + 0.1, torch.tensor([1, 0, 1 / 2, 0, 0])
    counted = torch.tensor([True, not ignore_empty_bins, True, True, True])
    powers = torch.linspace(0.1, 3, 29_001, dtype=torch.float64)
    errors = (1 - x.double() ** powers[:, None] - shares).square()[:, counted].sum(1)
    how = {"num_bins": 5, "bin_offset": "center", "ignore_empty_bins": ignore_empty_bins}
    assert fit_power(change, agree, **how) == pytest.approx(powers[errors.argmin()].item(), abs=2e-4)


def test_released_offset_and_empty_bins_shift_the_fit():
    """With fifty bins, 0.05 is two and a half bins to the right; empty bins count as no agreement."""
    change = torch.rand(100_000, dtype=torch.float64)
    agree = torch.rand(100_000) < 1 - change
    centered, released = (fit_power(change, agree, bin_offset=offset) for offset in ("center", "released"))
    assert released > centered * 1.03
    low = change < 0.5
    ignored, counted = (
        fit_power(change[low], agree[low], bin_offset="center", ignore_empty_bins=ignore) for ignore in (True, False)
    )
    assert abs(ignored - counted) > 0.1


@pytest.mark.parametrize(
    ("change", "agree"),
    [
        (torch.zeros(10), torch.ones(10, dtype=torch.bool)),
        (torch.rand(10), torch.zeros(10, dtype=torch.bool)),
        (torch.empty(0), torch.empty(0, dtype=torch.bool)),
        (torch.linspace(0, 1, 5000), torch.linspace(0, 1, 5000) > 0.98),  # fits best with a negative exponent
    ],
)
def test_what_cannot_be_fitted_moves_nothing(change, agree):
    reliability = Reliability(change, ReliabilityConfig(ignore_empty_bins=True))
    reliability.learn(agree)
    assert reliability.power == 1.0


def test_probabilities_and_momentum():
    change = torch.tensor([0.0, 0.25, 1.0])
    reliability = Reliability(change, ReliabilityConfig(init_power=0.5, power_momentum=0.9))
    assert reliability.probabilities().tolist() == [1.0, 0.5, 0.0]
    many = torch.rand(50_000)
    reliability = Reliability(many, ReliabilityConfig(power_momentum=0.9, bin_offset="center"))
    agree = torch.rand(50_000) < 1 - many**3
    reliability.learn(agree)
    assert reliability.power == pytest.approx(0.9 + 0.1 * fit_power(many, agree, bin_offset="center"))
    again = Reliability(many, reliability.config)
    again.restore(reliability.state())
    assert again.power == reliability.power


def test_learning_is_set_by_the_configuration():
    change = 0.5 * torch.rand(5000)
    agree = torch.rand(5000) < 1 - change**2
    for settings in (
        {"num_bins": 7, "bin_offset": "center", "ignore_empty_bins": True},
        {"num_bins": 20, "bin_offset": "released", "ignore_empty_bins": False},
    ):
        reliability = Reliability(change, ReliabilityConfig(power_momentum=0.0, **settings))
        reliability.learn(agree)
        assert reliability.power == fit_power(change, agree, **settings)


def test_schedule():
    reliability = Reliability(torch.zeros(1), ReliabilityConfig(update_start_epoch=3, update_every=2))
    assert [epoch for epoch in range(9) if reliability.is_due(epoch)] == [3, 5, 7]
