"""Settings of the networks that are trained: the teacher, and the students of the paper's own comparison."""

from typing import Annotated, Literal

from pydantic import Field

from rbm.config.section import (
    Count,
    CountOrZero,
    Experts,
    Layers,
    NonNegative,
    Positive,
    Probability,
    Section,
    Share,
    Width,
    section,
)
from rbm.utils.defaults import NUM_EXPERTS, TOP_K

Norm = Literal["none", "batch", "layer"]


@section
class Network(Section):
    """Settings of every trained network: shape, optimiser (Adam, one step an epoch), and when training stops.

    Epochs before ``min_epochs`` are not selected, whatever their validation accuracy.
    """

    num_layers: Layers = 2
    hidden_channels: Width = 128
    norm: Norm = "none"
    dropout: Probability = 0.3
    lr: Positive = 0.01
    weight_decay: NonNegative = 5e-4
    max_epochs: Count = 500
    patience: Count = 50
    min_epochs: CountOrZero = 0


class Pretrained:
    """Settings of sections with ``pretrain_epochs``: epochs before ``max_epochs``, without routing."""

    @property
    def pretraining(self) -> int:
        """Epochs of pretraining: at most as many as follow, so that ten epochs do not come to sixty."""
        return min(self.pretrain_epochs, self.max_epochs)


@section
class TeacherConfig(Network):
    """The teacher: ``sage`` (mean aggregation with the node itself), ``gcn``, ``gat``, ``appnp``, ``mlp`` (sees no
    edge), ``label_propagation`` (sees no feature and is not trained), or one of those that have settings of their own
    in :class:`AttentionConfig`, ``revgat`` and ``drgat``.

    In its first epochs a teacher may already order the classes well on a few hundred validation nodes while its soft
    labels are close to uniform; a student learns little from those. Hence ``min_epochs``.
    """

    name: str = "sage"
    dropout: Probability = 0.5
    min_epochs: CountOrZero = 20


@section
class SamplingConfig(Section):
    """Training by sampled neighbourhoods, for graphs too large for one pass: see :mod:`rbm.teachers.neighbor_sampling`.

    ``batch_size`` training nodes make a batch and an optimiser step; 0, the default, takes the whole graph at once. Of
    each node's neighbours ``fan_out`` are drawn, in every layer alike (``"10"``) or in each its own number, from the
    training nodes outwards (``"15,10,5"``); -1 takes all. A mean over drawn neighbours is one over those that were
    drawn; GCN counts degrees within a batch. Evaluation and soft labels take the whole graph.
    """

    batch_size: CountOrZero = 0
    fan_out: str = "10"

    def validate(self) -> None:
        parts = [part.strip() for part in self.fan_out.split(",")]
        whole = all(part == "-1" or (part.isdecimal() and int(part) > 0) for part in parts)
        self.require("fan_out", whole, "numbers from 1 on, or -1 for all neighbours, such as '10' or '15,10,5'")

    def neighbors(self, num_layers: int) -> list[int]:
        """A number for each layer.

        Raises:
            ValueError: ``fan_out`` has several numbers, but not as many as layers.
        """
        numbers = [int(part) for part in self.fan_out.split(",")]
        fits = len(numbers) in (1, num_layers)
        self.require("fan_out", fits, f"one number, or one for each of teacher.num_layers={num_layers} layers")
        return numbers * num_layers if len(numbers) == 1 else numbers


# The teachers whose results depend on the section ``attention``.
ATTENTION_TEACHERS = ("revgat", "drgat")


@section
class AttentionConfig(Section):
    """Settings of the teachers ``revgat`` and ``drgat`` beside :class:`TeacherConfig`; nothing else reads them.

    The defaults are those of RevGAT's released code for ogbn-arxiv, and of DRGAT's but for its dropouts of input and
    edges (0.35 and 0.5). One is ours: ``label_input`` is off, and theirs is on; it shows the classes of training nodes
    as features (:class:`rbm.teachers.LabelInput`), of which small graphs have few. Shape, ``dropout`` (of all hidden
    layers), learning rate, weight decay and epochs stand in :class:`TeacherConfig`, whose defaults suit GraphSAGE; what
    these two need instead stands in ``configs/teachers.yaml``, and as released in ``configs/ogbn-arxiv.yaml``.

    Each of the ``heads`` is ``teacher.hidden_channels`` wide; ``groups`` part the channels of a reversible layer
    (``revgat`` alone). ``label_mask_rate`` of the training labels are shown in training, and ``label_iterations``
    rounds of label reuse follow. RMSprop's learning rate rises to ``teacher.lr`` over ``warmup_epochs``. ``loss`` is
    ``log``, where a label that cannot be learned costs little (:func:`rbm.nn.losses.saturating_label_loss`), or
    ``cross_entropy``.
    """

    heads: Layers = 3
    groups: Annotated[int, Field(ge=2, le=1000)] = 2
    input_dropout: Probability = 0.25
    edge_dropout: Probability = 0.3
    label_input: bool = False
    label_mask_rate: Probability = 0.5
    label_iterations: CountOrZero = 1
    warmup_epochs: CountOrZero = 50
    loss: Literal["log", "cross_entropy"] = "log"


_AS_RBM = "at least 1, or 0 (section rbm's), and at most"


@section
class MLPConfig(Network):
    """The plain student that the RbM student is compared with, and each member of an ensemble. A depth and a width of 0
    and the norm ``same`` are those of the RbM student.
    """

    num_layers: Annotated[int, Field(ge=0, le=1000, description=f"{_AS_RBM} 1000")] = 0
    hidden_channels: Annotated[int, Field(ge=0, le=2**20, description=f"{_AS_RBM} {2**20}")] = 0
    norm: Annotated[
        Literal["none", "batch", "layer", "same"],
        Field(description="one of none, batch, layer, or same (section rbm's)"),
    ] = "same"


@section
class RbMConfig(Network, Pretrained):
    """The RbM student.

    ``decay`` is the share of the old memory in each update, ``anneal_delta`` and ``anneal_steps`` are its schedule
    (Eq. 13); ``memory_weight_decay`` lets the optimiser's weight decay act on the memory vectors where the
    self-similarity loss trains them; ``kmeans_max_rows = 0`` means all rows, where K-means places the memory. The first
    ``pretrain_epochs``, at most as many as ``max_epochs``, come before these and are not routed.

    ``select_pretraining`` lets validation accuracy choose one of these epochs too: the student is then the pretrained
    expert, copied to all. With ``init_scale`` and ``init_attention`` of 1 routing begins with the function that
    pretraining ends with. The release selects routed epochs alone, and starts at 2 and 1.1, which changes the function.
    ``route_from_best`` begins routing from the epoch of pretraining with the best validation accuracy, not from the
    last one.

    ``memory_init`` says where the memory vectors start: at the K-means centres of the rows that each router sees
    (``kmeans``), or at the mean directions of groups of nodes that the teacher tells apart, by K-means on its
    probabilities (``classes``) or on its last hidden layer (``teacher``).

    How far routed experts may move apart (:mod:`rbm.distillation.experts`): ``expert_pull`` is the share of its way to
    their mean that each goes after an optimiser step, 1 keeps them alike. ``routed_lr`` multiplies the learning rate of
    the experts once they are routed; 0 leaves them as they were cloned. ``shared_expert`` trains each as a shared part
    and a part of its own, which starts at zero; ``routed_lr`` then is that of the own part, and
    ``residual_weight_decay`` its weight decay.

    ``reset_dead_experts`` is a number of epochs, 0 for never: after every so many routed ones, experts that no observed
    node uses get a new start (:func:`rbm.reset_dead_experts`).
    """

    num_experts: Experts = NUM_EXPERTS
    top_k: int = TOP_K
    decay: Share = 0.9
    anneal_delta: NonNegative = 0.0
    anneal_steps: Count = 200
    input_attention: bool = True
    init_scale: Positive = 1.0
    init_attention: Positive = 1.0
    dropout_first_layer: bool = True
    detach_gates: bool = True
    gate_temperature: Positive = 1.0
    normalize_memory: bool = True
    normalize_memory_input: bool = True
    commitment_weight: NonNegative = 0.05
    self_similarity_weight: NonNegative = 0.01
    load_balance_weight: NonNegative = 0.01
    pretrain_epochs: CountOrZero = 12
    select_pretraining: bool = True
    reset_optimizer: bool = True
    memory_weight_decay: bool = False
    kmeans_max_rows: CountOrZero = 0
    route_from_best: bool = False
    memory_init: Literal["kmeans", "classes", "teacher"] = "kmeans"
    expert_pull: Share = 0.0
    routed_lr: NonNegative = 1.0
    shared_expert: bool = False
    residual_weight_decay: NonNegative = 0.0
    reset_dead_experts: CountOrZero = 0

    def validate(self) -> None:
        self.require("top_k", 1 <= self.top_k <= self.num_experts, f"between 1 and num_experts={self.num_experts}")
        self.require("routed_lr", self.reset_optimizer or self.routed_lr == 1, "1 where reset_optimizer is false")
        self.require(
            "shared_expert",
            not self.shared_expert or (self.reset_optimizer and self.expert_pull == 0),
            "false where reset_optimizer is false or expert_pull is above 0 (residual_weight_decay pulls as well)",
        )
        self.require(
            "residual_weight_decay", self.shared_expert or self.residual_weight_decay == 0, "0 without shared_expert"
        )
