"""How often edges join nodes of one class, and whether classes follow edges."""

import pytest
import torch

from rbm.datasets.homophily import Homophily, edge_homophily


@pytest.mark.parametrize(
    ("share", "chance", "follows"),
    [
        (0.3, 0.1, True),  # heterophilous are graphs below 0.3
        (0.29, 0.1, False),
        (0.31, 0.3, True),  # chance counts above 0.3 only
        (0.31, 0.31, False),
        (0.66, 0.5, True),  # 0.3 of the way from 0.5 to 1 is 0.65
        (0.64, 0.5, False),
    ],
)
def test_classes_follow_edges_beyond_chance(share, chance, follows):
    assert Homophily(share, chance, 10).follows_classes == follows


def test_edges_between_two_known_nodes_are_counted():
    """Not the self-loop, nor the edges of node 3, whose label is unknown; chance weighs classes by their ends."""
    edges = torch.tensor([[0, 1, 0, 2, 3, 0], [1, 0, 2, 2, 0, 3]])
    found = edge_homophily(edges, torch.tensor([0, 0, 1, 9]), torch.tensor([True, True, True, False]))
    assert found.edges == 3
    assert found.share == pytest.approx(2 / 3)
    assert found.chance == pytest.approx((5 / 6) ** 2 + (1 / 6) ** 2)
    assert edge_homophily(edges, torch.zeros(4).long(), torch.zeros(4).bool()) is None
