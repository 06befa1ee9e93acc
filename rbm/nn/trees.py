"""Boosted regression trees as a module of standard operators that predicts without scikit-learn."""

import numpy as np
import torch
from torch import Tensor, nn

from rbm.nn.pretrained import HubMixin
from rbm.nn.sparse_rows import Features, to_dense
from rbm.nn.students import rows_for

_TREES_AT_ONCE = 64  # bounds the memory of a forward: one number per row and tree
_NEVER = -30.0  # logit of a class without labels


class TreesStudent(HubMixin, nn.Module):
    """Boosted trees with ``logits_c = baseline_c`` plus the values of the leaves that a row reaches for class ``c``.

    Each round has ``outputs`` trees, which ``share`` maps to logits. The nodes of all trees are stored consecutively.
    Node ``i`` sends a row to ``left[i]`` if ``x[feature[i]] <= threshold[i]``, otherwise to ``right[i]``; NaN goes to
    the right. A leaf sends a row to itself.

    Args:
        in_channels: F.
        out_channels: C.
        rounds: number of boosting rounds.
        outputs: number of trees per round: one per class, or a single one for at most two classes.
        nodes: number of nodes of all trees.
        depth: number of steps from a root to the deepest leaf.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, rounds: int, outputs: int, nodes: int, depth: int
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.rounds, self.outputs, self.nodes, self.depth = rounds, outputs, nodes, depth
        for name in ("feature", "left", "right"):
            self.register_buffer(name, torch.zeros(nodes, dtype=torch.int64))
        self.register_buffer("roots", torch.zeros(rounds * outputs, dtype=torch.int64))
        # set by boosting, not by gradients
        for name, shape in (
            ("threshold", (nodes,)),
            ("value", (nodes,)),
            ("baseline", (out_channels,)),
            ("share", (outputs, out_channels)),
        ):
            setattr(self, name, nn.Parameter(torch.zeros(shape), requires_grad=False))

    def forward(self, x: Features) -> Tensor:
        """Logits ``[..., C]`` of rows ``[..., F]``."""
        return self.baseline + self.scores(x, 0, self.rounds) @ self.share

    def scores(self, x: Features, first: int, last: int) -> Tensor:
        """Sum of the leaf values of rounds ``first`` to ``last - 1``, ``[..., outputs]``."""
        rows = to_dense(rows_for(self, x))
        if rows.dim() != 2:
            return self.scores(rows.reshape(-1, self.in_channels), first, last).reshape(*rows.shape[:-1], self.outputs)
        total = rows.new_zeros(rows.shape[0], self.outputs)
        step = max(1, _TREES_AT_ONCE // self.outputs)
        for start in range(first, last, step):
            rounds = min(step, last - start)
            node = self.roots[start * self.outputs : (start + rounds) * self.outputs].expand(rows.shape[0], -1)
            for _ in range(self.depth):
                goes_left = rows.gather(1, self.feature[node]) <= self.threshold[node]
                node = torch.where(goes_left, self.left[node], self.right[node])
            total = total + self.value[node].unflatten(1, (rounds, self.outputs)).sum(1)
        return total

    @torch.no_grad()
    def begin(self, baseline: np.ndarray, classes: np.ndarray) -> None:
        """Set the logits before the first round.

        Args:
            baseline: ``[outputs]``.
            classes: classes of the labels, int ``[K]``, ascending; ``K`` is ``outputs``, two or one.
        """
        self.baseline.fill_(_NEVER)
        self.baseline[torch.from_numpy(classes)] = 0.0
        self.share.zero_()
        if len(classes) == self.outputs and len(classes) > 1:
            self.share[range(self.outputs), torch.from_numpy(classes)] = 1.0
        elif len(classes) == 2:
            self.share[0, int(classes[1])] = 1.0  # log-odds of the second class
        self.baseline += torch.from_numpy(baseline).to(self.baseline) @ self.share

    @torch.no_grad()
    def add(self, number: int, trees: list[np.ndarray], start: int) -> int:
        """Write the trees of a round.

        Args:
            number: index of the round, from 0.
            trees: ``outputs`` arrays of nodes in the format of scikit-learn's histogram boosting, with fields
                ``is_leaf``, ``feature_idx``, ``num_threshold`` (float64), ``left``, ``right`` and ``value``.
            start: number of nodes of earlier rounds.

        Returns:
            Number of nodes including this round.
        """
        for place, tree in enumerate(trees):
            leaf, indices = tree["is_leaf"].astype(bool), np.arange(len(tree)) + start
            stop = start + len(tree)
            columns = {
                "feature": np.where(leaf, 0, tree["feature_idx"]),
                "left": np.where(leaf, indices, tree["left"] + start),
                "right": np.where(leaf, indices, tree["right"] + start),
                "threshold": np.where(leaf, 0.0, _rounded_down(tree["num_threshold"])),
                "value": np.where(leaf, tree["value"], 0.0),
            }
            for name, values in columns.items():
                tensor = getattr(self, name)
                tensor[start:stop] = torch.from_numpy(values.astype(np.float64)).to(tensor)
            self.roots[number * self.outputs + place] = start
            start = stop
        return start

    @torch.no_grad()
    def trimmed(self, rounds: int, nodes: int) -> "TreesStudent":
        """A copy with only the first ``rounds`` rounds, which have ``nodes`` nodes."""
        kept = TreesStudent(
            self.in_channels,
            self.out_channels,
            rounds=rounds,
            outputs=self.outputs,
            nodes=nodes,
            depth=self.depth,
        )
        lengths = {
            "roots": rounds * self.outputs,
            **dict.fromkeys(("feature", "left", "right", "threshold", "value"), nodes),
        }
        kept.load_state_dict({name: tensor[: lengths.get(name)] for name, tensor in self.state_dict().items()})
        return kept.to(self.baseline.device).eval()


def _rounded_down(thresholds: np.ndarray) -> np.ndarray:
    """The largest float32 not above each float64 threshold ``t``: ``x <= t`` does not change for any float32 ``x``."""
    rounded = thresholds.astype(np.float32)
    too_large = rounded.astype(np.float64) > thresholds
    return np.where(too_large, np.nextafter(rounded, np.float32(-np.inf)), rounded)
