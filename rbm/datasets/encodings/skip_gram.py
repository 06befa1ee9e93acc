"""Skip-gram (Mikolov et al., NeurIPS 2013) in PyTorch: for Pythons for which gensim has no release.

The objective, the constants and the schedule are those of gensim's Word2Vec. Two things differ, so that the work is in
matrix products: all pairs of a node at one place of a walk share their negative samples, and the gradients of
``_GROUP`` such places, which are of different walks, are added up before they are applied.
"""

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_FIRST_RATE, _LAST_RATE = 0.025, 1e-4
_FREQUENT = 1e-3  # a node with a larger share of all places is left out at some of them
_NOISE_POWER = 0.75
_CHUNK = 8192  # places of walks that are prepared together
_GROUP = 32  # at most; on a small graph fewer, since a node must not occur at many places of a group


class SkipGram(NamedTuple):
    """Settings of skip-gram, for gensim and for :func:`skip_gram`; :func:`rbm.datasets.encodings.deepwalk` checks them.

    Attributes:
        dim: width of a vector.
        window_size: the largest distance of a node from one that it predicts.
        epochs: passes over the walks.
        negative: negative samples; 0 for none.
        hierarchical_softmax: train with a hierarchical softmax.
        seed: seed of the generator.
        advance: called with the number of walks read since the last call.
    """

    dim: int
    window_size: int
    epochs: int
    negative: int
    hierarchical_softmax: bool
    seed: int
    advance: Callable[[int], None] | None = None


def skip_gram(walks: np.ndarray, counts: np.ndarray, settings: SkipGram) -> np.ndarray:
    """Vectors of nodes that predict the nodes near them on walks.

    The result is bitwise reproducible on one machine. PyTorch uses one thread.

    Args:
        walks: integers ``[R, length]``, padded with -1 at the end, at least two different nodes in each row.
        counts: integers ``[N]``, how often each node is on a walk.
        settings: the settings.

    Returns:
        float32 ``[V, dim]``, the vectors of the V nodes that are on a walk, in their order.
    """
    dim, window_size, epochs, negative, hierarchical_softmax, seed, advance = settings
    met = np.flatnonzero(counts)
    words = np.full(counts.size + 1, -1, np.int32)  # the last entry is that of the padding
    words[met] = np.arange(met.size)
    generator = np.random.default_rng(seed)
    outputs = _Outputs(counts[met], negative, hierarchical_softmax, generator)
    share = counts[met] / counts.sum()
    # Probabilities where below 1; the last one is that of the padding.
    kept = np.append(np.sqrt(_FREQUENT / share) + _FREQUENT / share, 0)
    inputs = torch.from_numpy(generator.uniform(-1 / dim, 1 / dim, (met.size, dim)).astype(np.float32))
    weights = torch.zeros(outputs.num_rows, dim)

    group = int(np.clip(met.size // 8, 1, _GROUP))
    done, rows = 0, max(1, _CHUNK // walks.shape[1])
    with _one_thread():
        for begin in (begin for _ in range(epochs) for begin in range(0, len(walks), rows)):
            chunk = words[walks[begin : begin + rows]]
            rate = _FIRST_RATE - (_FIRST_RATE - _LAST_RATE) * done / (epochs * len(walks))
            chunk[generator.random(chunk.shape) >= kept[chunk]] = -1
            centers, contexts = _places(chunk, window_size, generator)
            targets, labels = outputs.of(centers)
            steps = rate * ((contexts >= 0)[:, :, None] & (targets >= 0)[:, None, :]).astype(np.float32)
            parts = (contexts.clip(0), targets.clip(0), labels, steps)
            for each in zip(*(torch.from_numpy(part).split(group) for part in parts), strict=True):
                _descend(inputs, weights, *each)
            done += chunk.shape[0]
            if advance is not None:
                advance(chunk.shape[0])
    return inputs.numpy()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let PyTorch use one thread: products as small as these take many times as long with two on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _descend(inputs: Tensor, weights: Tensor, contexts: Tensor, targets: Tensor, labels: Tensor, steps: Tensor) -> None:
    """One step of gradient descent on the logistic losses of ``G`` places, in place.

    Args:
        inputs: float32 ``[V, dim]``, the vectors of words.
        weights: float32 ``[outputs, dim]``.
        contexts: int32 ``[G, C]``, rows of ``inputs``.
        targets: int32 ``[G, P]``, rows of ``weights``.
        labels: float32 ``[G, P]``, what a product of both should predict.
        steps: float32 ``[G, C, P]``, the learning rate, or 0 for a pair that does not exist.
    """
    x, w = inputs[contexts], weights[targets]
    errors = (labels[:, None] - torch.bmm(x, w.transpose(1, 2)).sigmoid_()) * steps
    inputs.index_add_(0, contexts.flatten(), torch.bmm(errors, w).flatten(0, 1))
    weights.index_add_(0, targets.flatten(), torch.bmm(errors.transpose(1, 2), x).flatten(0, 1))


def _places(chunk: np.ndarray, window_size: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Centers ``[n]`` and contexts ``[n, 2 * window_size]`` of walks, both of integers, -1 for none.

    Neighbours in ``contexts`` are places of different walks. Words that were left out (-1) do not count as places.
    """
    order = np.argsort(chunk < 0, axis=1, kind="stable")
    walks = np.take_along_axis(chunk, order, axis=1)
    length = walks.shape[1]
    padded = np.pad(walks, ((0, 0), (window_size, window_size)), constant_values=-1)
    distances = np.array([distance for distance in range(-window_size, window_size + 1) if distance])
    contexts = np.stack([padded[:, window_size + d : window_size + d + length] for d in distances], axis=2)
    reach = generator.integers(1, window_size + 1, (*walks.shape, 1))
    contexts[(np.abs(distances) > reach) | (walks < 0)[:, :, None]] = -1
    contexts = contexts.transpose(1, 0, 2).reshape(-1, distances.size)
    found = (contexts >= 0).any(axis=1)
    return walks.T.reshape(-1)[found], contexts[found]


class _Outputs:
    """What a context has to predict of its center, as rows of one matrix of output weights.

    The first rows are those of the inner nodes of a Huffman tree: a center's targets are the nodes on its path from the
    root, and the labels tell which branch it takes. The other rows are those of the words: the center's has the label
    1, and those of the negative samples have 0.

    Attributes:
        num_rows: rows of the matrix.
    """

    def __init__(
        self, counts: np.ndarray, negative: int, hierarchical_softmax: bool, generator: np.random.Generator
    ) -> None:
        size = counts.size
        self.negative, self.generator = negative, generator
        self.paths, self.branches = _huffman(counts) if hierarchical_softmax else (np.zeros((size, 0), np.int32),) * 2
        self.first_word = size - 1 if hierarchical_softmax else 0
        self.num_rows = self.first_word + (size if negative else 0)
        noise = np.cumsum(counts**_NOISE_POWER)
        self.noise = noise / noise[-1]

    def of(self, centers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Targets int32 ``[n, P]``, -1 for none, and their labels, float32 ``[n, P]``."""
        targets, labels = [self.paths[centers]], [self.branches[centers]]
        if self.negative:
            drawn = np.searchsorted(self.noise, self.generator.random((centers.size, self.negative)), side="right")
            others = np.where(drawn == centers[:, None], -1, drawn + self.first_word)
            targets += [centers[:, None] + self.first_word, others]
            labels += [np.ones((centers.size, 1)), np.zeros(others.shape)]
        return np.concatenate(targets, axis=1, dtype=np.int32), np.concatenate(labels, axis=1, dtype=np.float32)


def _huffman(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each word, the inner nodes of the Huffman tree from its leaf to the root, and the branches taken there.

    Returns:
        int32 ``[V, depth]``, numbers of inner nodes, 0 to V - 2, or -1 beyond the root; and int32 ``[V, depth]``, 0 or
        1.
    """
    size = counts.size
    parents, sides = np.zeros(2 * size - 1, np.int32), np.zeros(2 * size - 1, np.int32)
    heap = [(count, word) for word, count in enumerate(counts.tolist())]
    heapq.heapify(heap)
    for inner in range(size, 2 * size - 1):
        (rare, left), (common, right) = heapq.heappop(heap), heapq.heappop(heap)
        parents[left] = parents[right] = inner
        sides[right] = 1
        heapq.heappush(heap, (rare + common, inner))
    root, at, paths, branches = 2 * size - 2, np.arange(size), [], []
    while (below := at != root).any():
        paths.append(np.where(below, parents[at] - size, -1))
        branches.append(np.where(below, sides[at], 0))
        at = np.where(below, parents[at], root)
    return np.stack(paths, axis=1, dtype=np.int32), np.stack(branches, axis=1, dtype=np.int32)
