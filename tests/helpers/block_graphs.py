"""Graphs whose classes follow their edges as far as a test wants: contextual stochastic block models."""

import torch
from torch_geometric.data import Data

from rbm.datasets.splits import per_class_masks


def block_graph(
    homophily: float,
    *,
    nodes: int = 600,
    classes: int = 3,
    degree: int = 10,
    features: int = 24,
    signal: float = 0.6,
    seed: int = 0,
) -> Data:
    """A contextual stochastic block model.

    Args:
        homophily: share of the edges that join nodes of one class.
        nodes: N.
        classes: C, of equal size.
        degree: mean number of neighbours.
        features: F, normal around a centre for each class.
        signal: distance of the centres from zero, in standard deviations.
        seed: of all that is drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(nodes) % classes
    count = nodes * degree // 2
    sources = torch.randint(nodes, (count,), generator=generator)
    other = (y[sources] + torch.randint(1, classes, (count,), generator=generator)) % classes
    same = torch.rand(count, generator=generator) < homophily
    # Classes take turns, so that a node of class c is c plus a multiple of their number.
    block = torch.randint(nodes // classes, (count,), generator=generator) * classes
    targets = block + torch.where(same, y[sources], other)
    edges = torch.stack([sources, targets])[:, sources != targets]
    edges = torch.cat([edges, edges.flip(0)], dim=1).unique(dim=1)
    centers = torch.nn.functional.normalize(torch.randn(classes, features, generator=generator), dim=1)
    x = torch.randn(nodes, features, generator=generator) + 4 * signal * centers[y]
    masks = per_class_masks(y, seed=seed, train_per_class=20, val_per_class=60)
    return Data(x=x, edge_index=edges, y=y, **dict(zip(("train_mask", "val_mask", "test_mask"), masks, strict=True)))
