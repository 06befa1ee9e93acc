"""DeepWalk (Perozzi et al., KDD 2014): a node's position in the graph, learned by skip-gram from random walks."""

import zlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from rbm.datasets.encodings.graph import check_edges

# gensim cuts longer sentences, and does not say so.
_LONGEST_WALK = 10_000
_CHUNK = 1024


def random_walks(
    edge_index: Tensor, num_nodes: int, *, walk_length: int = 50, walks_per_node: int = 5, seed: int = 0
) -> np.ndarray:
    """Walks along the edges, each step to a neighbour drawn uniformly.

    The nodes are visited ``walks_per_node`` times, each time in a new random order. An edge is walked from row 0 to row
    1; one that is there twice is twice as likely, and a self-loop is a step like any other. A walk ends at a node
    without outgoing edges.

    Args:
        edge_index: int64 ``[2, M]``.
        num_nodes: N.
        walk_length: nodes of a walk, its first one included, 2 to 10,000.
        walks_per_node: walks that begin at each node.
        seed: of the generator; the same arguments give the same walks on every machine.

    Returns:
        int32 (int64 from 2^31 nodes) ``[N * walks_per_node, walk_length]``, -1 behind the end of a walk.

    Raises:
        TypeError: edges that are not int64.
        ValueError: another shape, ids outside the graph, or a number out of range.
    """
    _check_walks(edge_index, num_nodes, walk_length, walks_per_node)
    sources, targets = edge_index.cpu().numpy()
    dtype = np.int32 if num_nodes < 2**31 else np.int64
    neighbors = targets[np.argsort(sources, kind="stable")].astype(dtype)
    degrees = np.bincount(sources, minlength=num_nodes)
    first = np.cumsum(degrees) - degrees

    generator = np.random.default_rng(seed)
    walks = np.full((num_nodes * walks_per_node, walk_length), -1, dtype)
    walks[:, 0] = np.concatenate([generator.permutation(num_nodes) for _ in range(walks_per_node)])
    rows, at = np.arange(walks.shape[0]), walks[:, 0]
    for step in range(1, walk_length):
        alive = degrees[at] > 0
        if not alive.all():
            rows, at = rows[alive], at[alive]
        # The product stays below the degree: a float64 below 1 times an integer never rounds up to it.
        drawn = (generator.random(at.size) * degrees[at]).astype(np.int64)
        at = neighbors[first[at] + drawn]
        walks[rows, step] = at
    return walks


def deepwalk(
    edge_index: Tensor,
    num_nodes: int,
    *,
    dim: int = 64,
    walk_length: int = 50,
    walks_per_node: int = 5,
    window_size: int = 5,
    epochs: int = 1,
    negative: int = 5,
    hierarchical_softmax: bool = True,
    workers: int = 1,
    seed: int = 0,
    advance: Callable[[int], None] | None = None,
) -> Tensor:
    """Positions of all nodes: skip-gram (gensim's Word2Vec) on :func:`random_walks`, where nodes are the words.

    A node that no walk brings together with another one gets zeros, as an unseen node without neighbours does in
    :func:`rbm.datasets.encodings.transfer`: gensim would leave it at its random initial vector, which says nothing.

    Args:
        edge_index: int64 ``[2, M]``, see :func:`random_walks` for this and the walks.
        num_nodes: N.
        dim: width of a position.
        walk_length: nodes of a walk.
        walks_per_node: walks that begin at each node.
        window_size: how far apart on a walk two nodes may lie to count as neighbours; each time a distance up to this
            one is drawn.
        epochs: passes of the skip-gram over the walks.
        negative: negative samples for each pair; 0 for none.
        hierarchical_softmax: learn by a hierarchical softmax; beside the negative samples where both are on, as in the
            released code.
        workers: threads. With more than one the result differs from run to run; with one it is the same bits, whatever
            ``PYTHONHASHSEED``.
        seed: of walks and skip-gram.
        advance: is told how many more walks have been read, of ``epochs * N * walks_per_node`` at most.

    Returns:
        float32 ``[N, dim]`` on the CPU.

    Raises:
        TypeError, ValueError: as :func:`random_walks`, and a number out of range, or neither of the two losses.
    """
    for name, value in (("dim", dim), ("window_size", window_size), ("epochs", epochs), ("workers", workers)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
    if negative < 0:
        raise ValueError(f"negative: got {negative}, expected at least 0")
    if not negative and not hierarchical_softmax:
        raise ValueError("negative: got 0 without hierarchical_softmax, expected a loss; set one of the two")
    walks = random_walks(edge_index, num_nodes, walk_length=walk_length, walks_per_node=walks_per_node, seed=seed)
    together = ((walks != walks[:, :1]) & (walks >= 0)).any(axis=1)
    walks = walks[together]
    counts = np.bincount(walks[walks >= 0], minlength=num_nodes)
    positions = np.zeros((num_nodes, dim), np.float32)
    if not walks.size:
        return torch.from_numpy(positions)

    from gensim.models import Word2Vec  # imported late, since it takes a second: the cache may have the positions

    model = Word2Vec(
        vector_size=dim,
        window=window_size,
        epochs=epochs,
        negative=negative,
        hs=int(hierarchical_softmax),
        sg=1,
        alpha=0.025,
        sample=1e-3,
        min_count=1,
        workers=workers,
        seed=seed,
        hashfxn=_hash,
    )
    met = np.flatnonzero(counts)
    frequencies = {str(node): int(count) for node, count in zip(met, counts[met], strict=True)}
    model.build_vocab_from_freq(frequencies, corpus_count=walks.shape[0])
    model.train(_Sentences(walks, num_nodes, advance), total_examples=walks.shape[0], epochs=epochs)
    positions[met] = model.wv[list(frequencies)]
    return torch.from_numpy(positions)


class _Sentences:
    """Walks as gensim reads them, again in each epoch, without ever holding all of them as Python objects.

    Words must be text: gensim takes an integer now for a word, now for a place in its vocabulary.
    """

    def __init__(self, walks: np.ndarray, num_nodes: int, advance: Callable[[int], None] | None) -> None:
        self.walks, self.advance = walks, advance
        self.words = [str(node) for node in range(num_nodes)]

    def __iter__(self) -> Iterator[list[str]]:
        words = self.words
        for begin in range(0, len(self.walks), _CHUNK):
            chunk = self.walks[begin : begin + _CHUNK]
            lengths = (chunk >= 0).sum(axis=1).tolist()
            for walk, length in zip(chunk.tolist(), lengths, strict=True):
                yield [words[node] for node in walk[:length]]
            if self.advance is not None:
                self.advance(len(chunk))


def _hash(word: str) -> int:
    return zlib.crc32(word.encode())


def _check_walks(edge_index: Tensor, num_nodes: int, walk_length: int, walks_per_node: int) -> None:
    check_edges(edge_index, num_nodes)
    if not 2 <= walk_length <= _LONGEST_WALK:
        raise ValueError(f"walk_length: got {walk_length}, expected 2 to {_LONGEST_WALK} nodes, the first one included")
    if walks_per_node < 1:
        raise ValueError(f"walks_per_node: got {walks_per_node}, expected at least 1")
