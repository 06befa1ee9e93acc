"""Labels of training nodes as a teacher's input, and label reuse."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rbm.nn.sparse_rows import Features, Rows, as_rows, concat_columns
from rbm.teachers.base import Teacher


class ShownLabels(nn.Module):
    """The labels of training nodes, for a teacher that looks at them.

    Which node a row is follows from the number of rows: each graph that the teacher may be asked about, the observed
    and the full one, comes with its own labels, and no two of these have equally many nodes. Rows of another number are
    nodes that it does not know, such as those of a subgraph: they show no class. Labels belong to a graph and not to
    the weights, so ``state_dict`` leaves them out.
    """

    def register_labels(self, labels: Sequence[Tensor]) -> None:
        """For each graph int64 ``[N]``, the class where it may be shown and -1 everywhere else.

        Raises:
            ValueError: two graphs with equally many nodes but other labels.
        """
        for known in labels:
            name = f"labels_of_{len(known)}"
            if hasattr(self, name) and not torch.equal(getattr(self, name), known):
                raise ValueError(f"labels: two graphs have {len(known)} nodes, expected to tell them apart by that")
            self.register_buffer(name, known, persistent=False)

    def known_labels(self, x: Rows) -> Tensor:
        """The labels of the graph that these rows are; -1 for all where it is none that came with labels."""
        labels = getattr(self, f"labels_of_{x.shape[0]}", None)
        return torch.full((x.shape[0],), -1, device=x.device) if labels is None else labels


class LabelInput(ShownLabels, Teacher):
    """A teacher that sees, beside each node's features, the classes of training nodes.

    It is called as any other, ``teacher(x, edge_index)``, and adds the columns itself: ``C`` of them, one-hot where a
    training node's class is shown. Nodes without a shown class first have zeros there; then, ``iterations`` times, the
    probabilities that the teacher itself has just found for them (label reuse).

    In training a random part of the training nodes shows its class, and :meth:`practise` says which nodes did not: the
    loss is theirs alone, else the network would learn to copy. In evaluation all training nodes show theirs. The
    labels of other nodes are not in here at all.

    Args:
        teacher: takes ``F + C`` columns.
        labels: for each graph int64 ``[N]``, the class where it may be shown and -1 everywhere else.
        num_classes: C.
        mask_rate: share of the training labels that is shown in training, in [0, 1).
        iterations: rounds of label reuse, each one forward more.

    Raises:
        ValueError: two graphs with equally many nodes but other labels, or a value out of range.
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

    def forward(self, x: Features, edge_index: Tensor) -> Tensor:
        if self.training:
            return self.practise(x, edge_index)[0]
        x = as_rows(x)
        edges = self._as_adjacency(x, edge_index)
        return self.teacher(self._beside_labels(x, edges, self.known_labels(x)), edges)

    def embed(self, x: Features, edge_index: Tensor) -> Tensor:
        x = as_rows(x)
        edges = self._as_adjacency(x, edge_index)
        return self.teacher.embed(self._beside_labels(x, edges, self.known_labels(x)), edges)

    def practise(self, x: Features, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[N, C]`` with a random part of the labels shown, and the training nodes that were not, int64."""
        x = as_rows(x)
        edges, known = self._as_adjacency(x, edge_index), self.known_labels(x)
        nodes = (known >= 0).nonzero().flatten()
        shown = torch.rand(len(nodes)) < self.mask_rate
        if shown.all():  # of a few labels; one of them at least is there to learn from
            shown[: int(shown.numel() > 0)] = False
        asked = nodes[~shown.to(nodes.device)]
        return self.teacher(self._beside_labels(x, edges, known.index_fill(0, asked, -1)), edges), asked

    def _beside_labels(self, x: Rows, edges: object, known: Tensor) -> Rows:
        shown = (known >= 0)[:, None]
        one_hot = F.one_hot(known.clamp_min(0), self.num_classes) * shown
        columns = one_hot
        for _ in range(self.iterations):
            with torch.no_grad():
                found = self.teacher(concat_columns(x, columns), edges).softmax(-1)
            columns = torch.where(shown, one_hot.to(found), found)
        return concat_columns(x, columns)
