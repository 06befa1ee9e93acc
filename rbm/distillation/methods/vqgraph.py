r"""VQGraph: an MLP that learns a GNN's soft labels and the codebook codes of nodes (Yang et al., VQGraph: Rethinking
Graph Representation Space for Bridging GNNs and MLPs, ICLR 2024).

A *tokenizer* is trained first and replaces the run's teacher. A graph convolution computes rows ``h``. Each row is
replaced by the code ``e`` with the largest cosine. Nodes and edges are reconstructed from the codes, and a second
convolution and a linear map compute class logits ``q``. With ``z = d_e(e)``, the adjacency ``A`` with self-loops and
:math:`\tilde G` the products ``z z^T`` scaled to [0, 1],

.. math:: L_{tokenizer} = CE(q_v, y_v) + w_n \|h - d_n(e)\|^2 + w_e \sqrt{\|A - \tilde G\|^2}
    + w_c \|h - \operatorname{sg} e\|^2

where norms are means over their entries. Gradients pass through a code to its row (straight-through), and codes follow
the mean of the rows assigned to them. With soft assignments at temperature ``T``, and ``u`` a linear map of the
student's last hidden rows,

.. math:: a_v = \operatorname{softmax}(\cos(h_v, e) / T), \quad b_v = \operatorname{softmax}(\cos(u_v, e) / T), \quad
    L = \lambda \, CE + (1 - \lambda) \, KL(p_v \,\|\, q_v) + \beta T^2 \, KL(a_v \,\|\, b_v)

Each term of the student's loss has its own pass: first the codes, then GLNN's two.

These are the losses of the released code (YangLing0818/VQGraph), with these differences:

- The best epoch has the best validation accuracy. The released code uses the best *test* accuracy for seen nodes.
- Codes have ``code_channels`` columns; in the released code, as many as the features. They start as rows of the graph;
  in the released code (``code_start="random"``) as random unit vectors, most of which are nearest to no row.
- Both soft assignments are softmaxes of cosines over the codes that are assigned to some node. The released code uses
  distances for the student and cosines for the tokenizer, both over all codes, and treats the tokenizer's
  probabilities as logarithms.
- No gradient flows through the smallest and the largest product.
- The tokenizer sees the whole observed graph in every step, like the GCN of the released code. There is no version with
  sampled neighbours.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.utils import add_self_loops, coalesce, remove_self_loops

from rbm.config import TokenizerConfig, VQGraphConfig
from rbm.datasets.splits import GraphSplit
from rbm.distillation.methods.glnn import GLNNTrainer, NodeLoss
from rbm.distillation.task import DistillationTask, TrainedStudent
from rbm.distillation.trainer import NodeTrainer
from rbm.nn import losses
from rbm.nn.dropout import dropout
from rbm.nn.evaluation import evaluating
from rbm.nn.sparse_rows import Rows, in_single_precision
from rbm.nn.students import MLPStudent, width_of_last
from rbm.teachers import GCN
from rbm.teachers.aggregation import aggregate, sparse_adjacency
from rbm.teachers.outputs import TeacherOutputs
from rbm.training.selection import Accuracies, split_accuracies
from rbm.utils.precision import full_precision, wide

# Products of rows and codes at once. They stay in a processor's cache (16 MB).
_PRODUCTS_AT_ONCE = 2**22


def products(rows: Tensor, others: Tensor) -> Iterator[Tensor]:
    """Parts of ``rows [N, D] @ others.T [D, K]``. Each part takes the memory of the one before."""
    at_once = max(1, min(len(rows), _PRODUCTS_AT_ONCE // max(1, len(others))))
    memory = rows.new_empty(at_once, len(others))
    for part in rows.split(at_once):
        yield torch.mm(part, others.T, out=memory[: len(part)])


def argmax(rows: Tensor) -> Tensor:
    """``rows.argmax(-1)`` of rows ``[N, K]``, on a CPU by NumPy, whose loop over adjacent numbers is vectorised."""
    return torch.from_numpy(rows.numpy().argmax(-1)) if rows.device.type == "cpu" else rows.argmax(-1)


class Codebook(nn.Module):
    """Codes ``[K, D]``, initially on the unit sphere, that follow the rows assigned to them.

    They start at random; :meth:`start_from` initialises them with rows.

    Args:
        size, channels: K and D.
        decay: weight of a code in its moving average; the rest is the normalised mean of its assigned unit rows.
    """

    codes: Tensor

    def __init__(self, size: int, channels: int, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", F.normalize(nn.init.kaiming_uniform_(torch.empty(size, channels))))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The code with the largest cosine to each of the rows ``[N, D]``, with the row's gradient, and its index
        ``[N]``. In training mode the codes are updated afterwards. Under autocast, all of this stays in float32.
        """
        rows = wide(rows)
        with torch.no_grad(), full_precision(rows.device):
            unit, codes = F.normalize(rows), F.normalize(self.codes)
            nearest = torch.cat([argmax(part) for part in products(unit, codes)])
            assigned = self.codes[nearest]
            if self.training:
                self._follow(unit, codes, nearest)
        return assigned + (rows - rows.detach()), nearest

    @torch.no_grad()
    def start_from(self, rows: Tensor) -> None:
        """Initialise codes with random rows of ``[N, D]``, scaled to length one. Rows of zeros are not used. If there
        are fewer rows than codes, the other codes do not change.
        """
        rows = F.normalize(rows[rows.norm(dim=1) > 0])
        drawn = torch.randperm(len(rows), device=rows.device)[: len(self.codes)]
        self.codes[: len(drawn)] = rows[drawn]

    def _follow(self, unit: Tensor, codes: Tensor, nearest: Tensor) -> None:
        counts = torch.bincount(nearest, minlength=len(codes))
        means = F.normalize(torch.zeros_like(codes).index_add_(0, nearest, unit))
        self.codes.lerp_(torch.where(counts[:, None] > 0, means, codes), 1 - self.decay)


class Tokens(NamedTuple):
    """Outputs of a tokenizer: rows ``[N, D]`` before quantisation, their codes ``[N, D]`` and code indices ``[N]``, the
    codes decoded for edges and for nodes, ``[N, D]`` each, and logits ``[N, C]``. All are float32, also under autocast.
    """

    rows: Tensor
    codes: Tensor
    nearest: Tensor
    for_edges: Tensor
    for_nodes: Tensor
    logits: Tensor


class Tokenizer(nn.Module):
    """Convolution, codebook, decoders, convolution and classifier.

    Args:
        in_channels, out_channels: number of features and of classes.
        config: settings of the tokenizer.
    """

    def __init__(self, in_channels: int, out_channels: int, config: TokenizerConfig) -> None:
        super().__init__()
        width, self.dropout = config.code_channels, config.dropout
        self.first = GCN.make_conv(in_channels, width)
        self.codebook = Codebook(config.codebook_size, width, config.decay)
        self.edge_decoder, self.node_decoder = nn.Linear(width, width), nn.Linear(width, width)
        self.second = GCN.make_conv(width, config.hidden_channels)
        self.head = nn.Linear(config.hidden_channels, out_channels)

    def forward(self, x: Rows, adjacency: Tensor) -> Tokens:
        """Tokens of rows ``[N, F]``, with the adjacency ``[N, N]`` of :meth:`rbm.teachers.GCN.adjacency`."""
        rows = dropout(self.first(x, adjacency).relu(), self.dropout, self.training)
        codes, nearest = self.codebook(rows)
        for_edges = self.edge_decoder(codes)
        logits = self.head(self.second(for_edges, adjacency).relu())
        return Tokens(*map(wide, (rows, codes, nearest, for_edges, self.node_decoder(codes), logits)))


class EdgeError:
    r"""Root mean squared difference of ``A`` and ``G = Z Z^T`` scaled to [0, 1], without a matrix ``[N, N]``.

    With the smallest product ``l``, the range ``r`` of all products, ``M`` entries of ``A`` and ``N`` nodes,

    .. math:: \|A - (G - l) / r\|^2 = M - \tfrac{2}{r} \Big(\sum_{A_{uv} = 1} z_u z_v - l M\Big)
        + \tfrac{1}{r^2} \Big(\|Z^T Z\|^2 - 2 l \|\textstyle\sum_v z_v\|^2 + l^2 N^2\Big)

    Args:
        edge_index: int64 ``[2, E]``; duplicate edges count once, and every node gets a self-loop.
        num_nodes: N.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int) -> None:
        edges, _ = remove_self_loops(edge_index)
        edges, _ = add_self_loops(coalesce(edges, num_nodes=num_nodes), num_nodes=num_nodes)
        self.count, self.num_nodes = edges.shape[1], num_nodes
        self.matrix = sparse_adjacency(edges, torch.ones(self.count, device=edges.device), num_nodes)

    def __call__(self, rows: Tensor, nearest: Tensor) -> Tensor:
        """The error, a scalar, for ``Z = rows [N, D]``. Rows with the same code index ``nearest [N]`` are equal."""
        low, span = self.range(rows.detach(), nearest)
        if span <= 1e-6 * max(abs(low), 1e-30):  # all rows are equal
            return rows.new_tensor(self.count**0.5 / self.num_nodes)
        edge_products = (rows * aggregate(self.matrix, rows)).sum().double()
        exact = rows.double()
        squares, total = (exact.T @ exact).square().sum(), exact.sum(0).square().sum()
        error = self.count - 2 / span * (edge_products - low * self.count)
        error = error + (squares - 2 * low * total + (low * self.num_nodes) ** 2) / span**2
        return (error / self.num_nodes**2).clamp_min(1e-12).sqrt().to(rows.dtype)

    @staticmethod
    def range(rows: Tensor, nearest: Tensor) -> tuple[float, float]:
        """The smallest product of two rows, and the difference between the largest and the smallest one."""
        indices, inverse = nearest.unique(return_inverse=True)
        distinct = rows.new_zeros(len(indices), rows.shape[1])
        distinct[inverse] = rows
        ends = torch.stack([torch.stack(part.aminmax()) for part in products(distinct, distinct)])
        low, high = float(ends[:, 0].min()), float(ends[:, 1].max())
        return low, high - low


class TokenizerTrainer(NodeTrainer):
    """Trainer of a tokenizer; one step per epoch on the whole observed graph."""

    model: Tokenizer

    def __init__(self, model: Tokenizer, split: GraphSplit, config: TokenizerConfig) -> None:
        super().__init__(model, split, config, None)
        self.config, observed, graph = config, split.observed, split.graph
        self.rows, self.full_rows = (in_single_precision(x) for x in (self.observed_x, self.full_x))
        self.adjacency = GCN.adjacency(observed.edge_index, observed.num_nodes)
        self.full_adjacency = self.adjacency
        if len(split.unseen_nodes):
            self.full_adjacency = GCN.adjacency(graph.edge_index, graph.num_nodes)
        self.edge_error = EdgeError(observed.edge_index, observed.num_nodes)
        if config.code_start == "rows":
            with evaluating(model), torch.no_grad():
                model.codebook.start_from(model(self.rows, self.adjacency).rows)

    def epoch_loss(self, epoch: int) -> Tensor:
        return self.loss(self.forward(self.model, self.rows, self.adjacency))

    def loss(self, tokens: Tokens) -> Tensor:
        """Cross-entropy of the labelled nodes plus the reconstruction losses of nodes and edges and the commitment."""
        config = self.config
        loss = self.labelled_loss(tokens.logits)
        loss = loss + config.node_weight * F.mse_loss(tokens.rows, tokens.for_nodes)
        loss = loss + config.commitment_weight * F.mse_loss(tokens.codes.detach(), tokens.rows)
        if config.edge_weight > 0:
            loss = loss + config.edge_weight * self.edge_error(tokens.for_edges, tokens.nearest)
        return loss

    @torch.no_grad()
    def tokens(self) -> tuple[Tokens, Tensor]:
        """Tokens of the observed nodes, and logits ``[N, C]`` of all nodes."""
        observed = self.forward(self.model, self.rows, self.adjacency)
        if not len(self.split.unseen_nodes):
            return observed, observed.logits
        return observed, self.forward(self.model, self.full_rows, self.full_adjacency).logits

    def evaluate(self) -> Accuracies:
        observed, logits = self.tokens()
        return split_accuracies(observed.logits, logits, self.split)


class VQGraphTrainer(GLNNTrainer):
    """GLNN's two passes after a pass on codes.

    Args:
        model: the student.
        split: the graph, and what training may see of it.
        observed, logits: see :meth:`TokenizerTrainer.tokens`.
        codes: all codes of the codebook, ``[K, D]``.
        config: settings of the method.
    """

    def __init__(
        self,
        model: MLPStudent,
        split: GraphSplit,
        observed: Tokens,
        logits: Tensor,
        codes: Tensor,
        config: VQGraphConfig,
    ) -> None:
        super().__init__(model, split, TeacherOutputs(observed.logits, logits, {}), config)
        self.codes, self.unit_rows = F.normalize(codes[observed.nearest.unique()]), F.normalize(observed.rows)
        self.projection = nn.Linear(width_of_last(model), codes.shape[1]).to(codes.device)

    def train_epoch(self, epoch: int) -> float:
        total = 0.0
        if self.config.code_weight > 0:
            total = float(self._pass(self.observed_nodes, self.code_loss, self.config.code_weight))
        return total + super().train_epoch(epoch)

    def batch_loss(self, nodes: Tensor, target: NodeLoss) -> Tensor:
        if target != self.code_loss:
            return super().batch_loss(nodes, target)
        # The norm's output is recorded, as a second call would update BatchNorm's running statistics twice per step.
        normed: list[Tensor] = []
        with ExitStack() as hooks:
            for norm in self.model.norms[-1:]:
                hooks.enter_context(norm.register_forward_hook(lambda *call: normed.append(call[-1])))
            _, trace = self.forward(self.model, self.observed_x[nodes], return_trace=True)
        hidden = wide(trace.last)
        if normed:
            hidden = dropout(wide(normed[0]).relu(), self.config.dropout, self.model.training)
        return self.code_loss(self.projection(hidden), nodes)

    def code_loss(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Mean of ``T^2 KL(a || b)`` over ``nodes [B]`` with projected rows ``rows [B, D]``."""
        temperature = self.config.code_temperature
        ours, theirs = F.normalize(rows) @ self.codes.T, self.unit_rows[nodes] @ self.codes.T
        return temperature**2 * losses.soft_label_loss(ours, theirs, temperature)


def train_vqgraph(task: DistillationTask) -> TrainedStudent:
    """Train a tokenizer on the graph, then an MLP on its soft labels and codes, on features only."""
    config, split = task.config.vqgraph, task.split
    task.seed(1)
    tokenizer = Tokenizer(split.graph.num_features, task.classes, config.tokenizer).to(split.graph.x.device)
    tokenizer_trainer = TokenizerTrainer(tokenizer, split, config.tokenizer)
    task.fit("vqgraph-tokenizer", tokenizer_trainer, config.tokenizer)
    student = task.new_student(MLPStudent, config)
    trainer = VQGraphTrainer(student, split, *tokenizer_trainer.tokens(), tokenizer.codebook.codes, config)
    return TrainedStudent(student, task.fit("vqgraph", trainer, config), None)
