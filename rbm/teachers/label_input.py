"""Labels of training nodes as a teacher's input, and label reuse."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.nn.sparse_rows import Features, Rows, as_rows, concat_columns
from rbm.teachers.base import Teacher


class ShownLabels(nn.Module):
    """Mixin for a teacher that uses the labels of training nodes.

    The number of rows identifies the graph: the observed graph and the full graph have different numbers of nodes, and
    labels are registered for both. Any other number of rows, such as of a subgraph, has no known labels. Labels belong
    to a graph and not to the weights, so they are not in ``state_dict``.
    """

    def register_labels(self, labels: Sequence[Tensor]) -> None:
        """Register the labels of each graph, int64 ``[N]``: the class of a training node, -1 for all other nodes.

        Raises:
            ValueError: two graphs have the same number of nodes but different labels.
        """
        for known in labels:
            name = f"labels_of_{len(known)}"
            if hasattr(self, name) and not torch.equal(getattr(self, name), known):
                raise ValueError(f"labels: two graphs have {len(known)} nodes, expected to tell them apart by that")
            self.register_buffer(name, known, persistent=False)

    def known_labels(self, x: Rows) -> Tensor:
        """The labels of the graph with these rows; all -1 if no labels are registered for it."""
        labels = getattr(self, f"labels_of_{x.shape[0]}", None)
        return torch.full((x.shape[0],), -1, device=x.device) if labels is None else labels


class LabelInput(ShownLabels, Teacher):
    """A teacher whose inputs are each node's features and the classes of training nodes.

    It is called like other teachers, ``teacher(x, edge_index)``, and adds ``C`` columns itself: a one-hot row for a
    training node whose class is shown, zeros for other nodes. In each of ``iterations`` rounds, these zeros are then
    replaced by the probabilities that the teacher predicts for the nodes (label reuse).

    In training, a random part of the training nodes shows its class. :meth:`masked_forward` returns the other training
    nodes, which alone define the loss; otherwise the network would learn to copy. In evaluation, all training nodes
    show their class. The labels of other nodes are not stored.

    Args:
        teacher: teacher for ``F + C`` columns.
        labels: labels of each graph, int64 ``[N]``: the class of a training node, -1 for all other nodes.
        num_classes: C.
        mask_rate: share of the training labels that is shown in training, in [0, 1).
        iterations: rounds of label reuse, each of which costs one more forward.

    Raises:
        ValueError: two graphs have the same number of nodes but different labels, or a value is out of range.
    """

    def __init__(
        self, teacher: Teacher, labels: Sequence[Tensor], num_classes: int, mask_rate: float = 0.5, iterations: int = 1
    ) -> None:
        super().__init__()
        if not 0.0 <= mask_rate < 1.0:
            raise ValueError(f"mask_rate: got {mask_rate}, expected at least 0 and below 1")
        if iterations < 0:
            raise ValueError(f"iterations: got {iterations}, expected at least 0")
        self.teacher, self.num_classes = teacher, num_classes
        self.mask_rate, self.iterations = mask_rate, iterations
        self.register_labels(labels)

    def adjacency(self, *args, **kwargs):
        return self.teacher.adjacency(*args, **kwargs)

    def reach(self, num_layers: int) -> int:
        return self.teacher.reach(num_layers) * (1 + self.iterations)

    def forward(self, x: Features, edge_index: Tensor) -> Tensor:
        if self.training:
            return self.masked_forward(x, edge_index)[0]
        x = as_rows(x)
        edges = self._as_adjacency(x, edge_index)
        return self.teacher(self._with_labels(x, edges, self.known_labels(x)), edges)

    def embed(self, x: Features, edge_index: Tensor) -> Tensor:
        x = as_rows(x)
        edges = self._as_adjacency(x, edge_index)
        return self.teacher.embed(self._with_labels(x, edges, self.known_labels(x)), edges)

    def masked_forward(self, x: Features, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[N, C]`` with a random part of the labels shown, and the other training nodes, int64."""
        x = as_rows(x)
        edges, known = self._as_adjacency(x, edge_index), self.known_labels(x)
        nodes = (known >= 0).nonzero().flatten()
        shown = torch.rand(len(nodes)) < self.mask_rate
        if shown.all():  # possible with few labels; at least one must remain for the loss
            shown[: int(shown.numel() > 0)] = False
        hidden = nodes[~shown.to(nodes.device)]
        return self.teacher(self._with_labels(x, edges, known.index_fill(0, hidden, -1)), edges), hidden

    def _with_labels(self, x: Rows, edges: object, known: Tensor) -> Rows:
        shown = (known >= 0)[:, None]
        one_hot = F.one_hot(known.clamp_min(0), self.num_classes) * shown
        columns = one_hot
        for _ in range(self.iterations):
            with torch.no_grad():
                found = self.teacher(concat_columns(x, columns), edges).softmax(-1)
            columns = torch.where(shown, one_hot.to(found), found)
        return concat_columns(x, columns)
