"""DeepWalk (Perozzi et al., KDD 2014): positions of nodes in the graph, learned by skip-gram from random walks."""

import logging
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from rbm.datasets.encodings.graph import check_edges
from rbm.datasets.encodings.skip_gram import SkipGram, skip_gram
from rbm.utils.environment import package_version

# gensim silently truncates longer sentences.
_LONGEST_WALK = 10_000
_CHUNK = 1024


def random_walks(
    edge_index: Tensor, num_nodes: int, *, walk_length: int = 50, walks_per_node: int = 5, seed: int = 0
) -> np.ndarray:
    """Random walks along the edges; each step goes to a neighbour drawn uniformly.

    ``walks_per_node`` times, one walk starts at each node, in a new random order of the nodes. An edge is followed from
    row 0 to row 1; a duplicate edge is twice as likely, and a self-loop counts as a step. A walk ends at a node without
    outgoing edges.

    Args:
        edge_index: int64 ``[2, M]``.
        num_nodes: N.
        walk_length: nodes per walk, including the first one, 2 to 10,000.
        walks_per_node: walks that begin at each node.
        seed: seed of the generator; the same arguments give the same walks on every machine.

    Returns:
        int32 (int64 from 2^31 nodes) ``[N * walks_per_node, walk_length]``, padded with -1 after the end of a walk.

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
        # The product is always below the degree: a float64 below 1 times an integer never rounds up to the integer.
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
    """Positions of all nodes: skip-gram on :func:`random_walks`, with nodes as words.

    gensim's Word2Vec trains it where gensim is installed, as it is by default up to Python 3.13, and
    :func:`rbm.datasets.encodings.skip_gram.skip_gram` elsewhere. The numbers differ, not what they say of the graph.

    A node that never occurs with another node on a walk gets zeros, like an unseen node without neighbours in
    :func:`rbm.datasets.encodings.transfer`. gensim would leave it at its random initial vector, which is meaningless.

    Args:
        edge_index: int64 ``[2, M]``, see :func:`random_walks`.
        num_nodes: N.
        dim: width of a position.
        walk_length: nodes per walk.
        walks_per_node: walks that begin at each node.
        window_size: the largest distance on a walk at which two nodes count as neighbours; the distance used is drawn
            anew each time, up to this one.
        epochs: passes of the skip-gram over the walks.
        negative: negative samples per pair; 0 for none.
        hierarchical_softmax: train with a hierarchical softmax, in addition to negative samples if both are on, as in
            the released code.
        workers: threads of gensim. With one, the result is bitwise reproducible, whatever ``PYTHONHASHSEED``; with
            more, it differs from run to run. Without gensim there is one.
        seed: seed of the walks and of skip-gram.
        advance: called with the number of walks read since the last call, in total at most
            ``epochs * N * walks_per_node``. If it raises an exception, the training ends early with this exception.

    Returns:
        float32 ``[N, dim]`` on the CPU.

    Raises:
        TypeError, ValueError: as :func:`random_walks`, a number out of range, or neither of the two losses enabled.
    """
    for name, value in (("dim", dim), ("window_size", window_size), ("epochs", epochs), ("workers", workers)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
    if negative < 0:
        raise ValueError(f"negative: got {negative}, expected at least 0")
    if not negative and not hierarchical_softmax:
        raise ValueError("negative: got 0 without hierarchical_softmax, expected a loss; set one of the two")
    walks = random_walks(edge_index, num_nodes, walk_length=walk_length, walks_per_node=walks_per_node, seed=seed)
    walks = walks[((walks != walks[:, :1]) & (walks >= 0)).any(axis=1)]
    if not walks.size:
        return torch.zeros(num_nodes, dim)
    settings = SkipGram(dim, window_size, epochs, negative, hierarchical_softmax, seed, advance)
    counts = np.bincount(walks[walks >= 0], minlength=num_nodes)
    vectors = _word2vec(walks, counts, settings, workers) if gensim_version() else skip_gram(walks, counts, settings)
    positions = torch.zeros(num_nodes, dim)
    positions[torch.from_numpy(counts > 0)] = torch.from_numpy(vectors)
    return positions


def gensim_version() -> str:
    """The version of the gensim that trains positions, or an empty string where :func:`skip_gram` does."""
    return package_version("gensim") if find_spec("gensim") else ""


def _is_no_advice(record: logging.LogRecord) -> bool:
    """Not gensim's warning that two losses at once are probably a mistake: the released code has both."""
    return "hierarchical softmax and negative sampling" not in record.getMessage()


def _word2vec(walks: np.ndarray, counts: np.ndarray, settings: SkipGram, workers: int) -> np.ndarray:
    """:func:`skip_gram` by gensim."""
    from gensim.models import Word2Vec  # imported here because it takes a second, and the positions may be cached

    model = Word2Vec(
        vector_size=settings.dim,
        window=settings.window_size,
        epochs=settings.epochs,
        negative=settings.negative,
        hs=int(settings.hierarchical_softmax),
        sg=1,
        alpha=0.025,
        sample=1e-3,
        min_count=1,
        workers=workers,
        seed=settings.seed,
        hashfxn=_hash,
    )
    met = np.flatnonzero(counts)
    frequencies = {str(node): int(count) for node, count in zip(met, counts[met], strict=True)}
    model.build_vocab_from_freq(frequencies, corpus_count=walks.shape[0])
    sentences = _Sentences(walks, counts.size, settings.advance)
    logger = logging.getLogger("gensim.models.word2vec")
    logger.addFilter(_is_no_advice)
    try:
        model.train(sentences, total_examples=walks.shape[0], epochs=settings.epochs)
    finally:
        logger.removeFilter(_is_no_advice)
    if sentences.error is not None:
        raise sentences.error
    return model.wv[list(frequencies)]


class _Sentences:
    """An iterable of walks for gensim, which reads them in each epoch; they are never all held as Python objects.

    Words must be strings: gensim treats an integer sometimes as a word and sometimes as an index into its vocabulary.

    Attributes:
        error: exception of ``advance``, which ends the iteration. gensim iterates in a thread of its own, in which an
            exception would be lost and leave the other threads waiting.
    """

    def __init__(self, walks: np.ndarray, num_nodes: int, advance: Callable[[int], None] | None) -> None:
        self.walks, self.advance = walks, advance
        self.words = [str(node) for node in range(num_nodes)]
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[list[str]]:
        words = self.words
        if self.error is not None:  # in an earlier epoch
            return
        for begin in range(0, len(self.walks), _CHUNK):
            chunk = self.walks[begin : begin + _CHUNK]
            lengths = (chunk >= 0).sum(axis=1).tolist()
            for walk, length in zip(chunk.tolist(), lengths, strict=True):
                yield [words[node] for node in walk[:length]]
            try:
                if self.advance is not None:
                    self.advance(len(chunk))
            except Exception as error:
                self.error = error
                return


def _hash(word: str) -> int:
    return zlib.crc32(word.encode())


def _check_walks(edge_index: Tensor, num_nodes: int, walk_length: int, walks_per_node: int) -> None:
    check_edges(edge_index, num_nodes)
    if not 2 <= walk_length <= _LONGEST_WALK:
        raise ValueError(f"walk_length: got {walk_length}, expected 2 to {_LONGEST_WALK} nodes, the first one included")
    if walks_per_node < 1:
        raise ValueError(f"walks_per_node: got {walks_per_node}, expected at least 1")
