"""Graphs with chosen homophily: contextual stochastic block models.

The model is that of Deshpande, Sen, Montanari and Mossel (Contextual Stochastic Block Models, NeurIPS 2018): edges and
features both depend on the class, and are independent given the class.
"""

import torch
from torch import Tensor
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
    words: int = 0,
    train_per_class: int = 20,
    val_per_class: int = 60,
    seed: int = 0,
) -> Data:
    """A contextual stochastic block model.

    Args:
        homophily: share of the edges that join nodes of the same class.
        nodes: N.
        classes: C, of equal size.
        degree: mean number of neighbours.
        features: F.
        signal: how informative features are. Dense features are normal around a centre per class, at a distance of
            four times this many standard deviations from zero. For sparse features, it is the share of a node's words
            that come from its class's tenth of all words.
        words: 0 gives dense features; another number gives ``x`` as a CSR tensor of zeros and ones, with at most this
            many ones per row.
        train_per_class: training nodes per class.
        val_per_class: validation nodes per class; all others are test nodes.
        seed: seed of all random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(nodes) % classes
    count = nodes * degree // 2
    sources = torch.randint(nodes, (count,), generator=generator)
    other = (y[sources] + torch.randint(1, classes, (count,), generator=generator)) % classes
    same = torch.rand(count, generator=generator) < homophily
    # Classes alternate, so that the ids of nodes of class c are c plus multiples of the number of classes.
    block = torch.randint(nodes // classes, (count,), generator=generator) * classes
    targets = block + torch.where(same, y[sources], other)
    edges = torch.stack([sources, targets])[:, sources != targets]
    edges = torch.cat([edges, edges.flip(0)], dim=1).unique(dim=1)
    draw = _words if words else _points
    x = draw(y, classes, features, signal, generator, *([words] if words else []))
    masks = per_class_masks(y, seed=seed, train_per_class=train_per_class, val_per_class=val_per_class)
    return Data(x=x, edge_index=edges, y=y, **dict(zip(("train_mask", "val_mask", "test_mask"), masks, strict=True)))


def _points(y: Tensor, classes: int, features: int, signal: float, generator: torch.Generator) -> Tensor:
    centers = torch.nn.functional.normalize(torch.randn(classes, features, generator=generator), dim=1)
    return torch.randn(len(y), features, generator=generator) + 4 * signal * centers[y]


def _words(y: Tensor, classes: int, features: int, signal: float, generator: torch.Generator, words: int) -> Tensor:
    topic = max(1, features // 10)
    topics = torch.stack([torch.randperm(features, generator=generator)[:topic] for _ in range(classes)])
    of_class = topics[y[:, None], torch.randint(topic, (len(y), words), generator=generator)]
    of_any = torch.randint(features, (len(y), words), generator=generator)
    chosen = torch.where(torch.rand(len(y), words, generator=generator) < signal, of_class, of_any)
    return torch.zeros(len(y), features).scatter_(1, chosen, 1.0).to_sparse_csr()
