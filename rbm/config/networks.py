"""Settings of the trained networks: the teacher, the MLP student and the RbM student."""

from typing import Annotated, Literal

from pydantic import Field

from rbm.config.section import (
    Count,
    CountOrZero,
    Divisor,
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
    """Settings of every trained network: shape, optimiser (Adam, one step per epoch), and when training stops.

    Epochs before ``min_epochs`` are never selected, whatever their validation accuracy.
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
    """Mixin for sections with ``pretrain_epochs``, the epochs without routing that come before ``max_epochs``."""

    @property
    def pretraining(self) -> int:
        """Epochs of pretraining: at most ``max_epochs``, so that a run of ten epochs does not pretrain for fifty."""
        return min(self.pretrain_epochs, self.max_epochs)


@section
class TeacherConfig(Network):
    """The teacher.

    ``name`` is ``sage`` (mean aggregation that includes the node itself), ``gcn``, ``gat``, ``appnp``, ``mlp`` (uses no
    edges), ``label_propagation`` (uses no features and is not trained), ``revgat`` or ``drgat`` (with further settings
    in :class:`AttentionConfig`).

    In the first epochs, a teacher may already rank the classes well on a few hundred validation nodes while its soft
    labels are still close to uniform. A student learns little from such labels, hence ``min_epochs``.
    """

    name: str = "sage"
    dropout: Probability = 0.5
    min_epochs: CountOrZero = 20


@section
class SamplingConfig(Section):
    """Training on sampled neighbourhoods, for graphs too large for one pass: see :mod:`rbm.teachers.neighbor_sampling`.

    Each optimiser step uses a batch of ``batch_size`` training nodes; 0, the default, uses the whole graph at once.
    ``fan_out`` neighbours are drawn per node: the same number in every layer (``"10"``), or one number per layer from
    the training nodes outwards (``"15,10,5"``); -1 takes all. Mean aggregation averages over the drawn neighbours only,
    and GCN counts degrees within a batch. Evaluation and soft labels use the whole graph.
    """

    batch_size: CountOrZero = 0
    fan_out: str = "10"

    def validate(self) -> None:
        parts = [part.strip() for part in self.fan_out.split(",")]
        whole = all(part == "-1" or (part.isdecimal() and int(part) > 0) for part in parts)
        self.require("fan_out", whole, "numbers from 1 on, or -1 for all neighbours, such as '10' or '15,10,5'")

    def neighbors(self, num_layers: int) -> list[int]:
        """The number of drawn neighbours for each layer.

        Raises:
            ValueError: ``fan_out`` has several numbers, but not one per layer.
        """
        numbers = [int(part) for part in self.fan_out.split(",")]
        fits = len(numbers) in (1, num_layers)
        self.require("fan_out", fits, f"one number, or one for each of teacher.num_layers={num_layers} layers")
        return numbers * num_layers if len(numbers) == 1 else numbers


# The teachers whose results depend on the section ``attention``.
ATTENTION_TEACHERS = ("revgat", "drgat")


@section
class AttentionConfig(Section):
    """Settings of the teachers ``revgat`` and ``drgat`` in addition to :class:`TeacherConfig`; nothing else reads them.

    The defaults are those of RevGAT's released code for ogbn-arxiv. DRGAT's released code has the same values except
    for the dropouts of input and edges (0.35 and 0.5). ``label_input`` differs: it is off here and on in both releases.
    It adds the classes of training nodes as features (:class:`rbm.teachers.LabelInput`); small graphs have few of
    these. Shape, ``dropout`` (of all hidden layers), learning rate, weight decay and epochs are settings of
    :class:`TeacherConfig`, whose defaults suit GraphSAGE. ``configs/teachers.yaml`` has the values for these two
    teachers, and ``configs/ogbn-arxiv.yaml`` the released ones.

    Each of the ``heads`` has ``teacher.hidden_channels`` channels. ``groups`` is the number of channel groups of a
    reversible layer (``revgat`` only). Training shows a share ``label_mask_rate`` of the training labels, followed by
    ``label_iterations`` rounds of label reuse. RMSprop's learning rate rises to ``teacher.lr`` over ``warmup_epochs``.
    ``loss`` is ``cross_entropy`` or ``log``, in which a label that cannot be learned costs little
    (:func:`rbm.nn.losses.saturating_label_loss`).
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
    """The MLP student that the RbM student is compared with, and each member of an ensemble.

    A depth or width of 0 and the norm ``same`` mean the value of the RbM student.
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

    ``decay`` is the share of the old memory in each update; ``anneal_delta`` and ``anneal_steps`` define its schedule
    (Eq. 14). ``memory_weight_decay`` applies the optimiser's weight decay to the memory vectors, if the self-similarity
    loss trains them. ``kmeans_max_rows`` limits the rows that K-means initialises the memory from (0: all rows).
    ``pretrain_epochs`` epochs without routing, at most ``max_epochs``, come before ``max_epochs`` epochs with routing.

    With ``select_pretraining``, validation accuracy may also select a pretraining epoch: the student is then the
    pretrained expert, copied to all experts. If ``init_scale`` and ``init_attention`` are 1, routing begins with the
    function that pretraining ends with. The released code selects among routed epochs only and starts at 2 and 1.1,
    which changes the function. ``route_from_best`` begins routing from the pretraining epoch with the best validation
    accuracy instead of the last one.

    ``memory_init`` selects where the memory vectors start: at the K-means centres of the rows that each router sees
    (``kmeans``), or at the mean directions of groups of nodes, found by K-means on the teacher's probabilities
    (``classes``) or on its last hidden layer (``teacher``).

    Three settings limit how far routed experts move apart (:mod:`rbm.distillation.experts`). ``expert_pull`` moves each
    expert by this share of the way to their mean after each optimiser step; 1 keeps them equal. ``routed_lr``
    multiplies the learning rate of the experts once routing begins; 0 leaves them as cloned. ``shared_expert`` trains
    each expert as a shared part plus a part of its own, which starts at zero; ``routed_lr`` then applies to the own
    part, and ``residual_weight_decay`` is its weight decay.

    ``reset_dead_experts`` is a number of routed epochs (0: never). Each time that many have passed, experts that no
    observed node uses are started anew (:func:`rbm.reset_dead_experts`).

    With ``start_as_mlp``, pretraining starts from the weights and random numbers of the student ``mlp``. If the two
    sections' other settings and their dropout are equal (``dropout_first_layer`` is then false, as the MLP has none
    there), both train alike, to the bit, until routing begins.
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
    gate_temperature: Divisor = 1.0
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
    start_as_mlp: bool = True

    def validate(self) -> None:
        self.require("top_k", 1 <= self.top_k <= self.num_experts, f"between 1 and num_experts={self.num_experts}")
        fits = self.memory_init != "kmeans" or self.kmeans_max_rows == 0 or self.kmeans_max_rows >= self.num_experts
        self.require("kmeans_max_rows", fits, f"0 (all rows) or at least num_experts={self.num_experts}")
        self.require("routed_lr", self.reset_optimizer or self.routed_lr == 1, "1 where reset_optimizer is false")
        self.require(
            "shared_expert",
            not self.shared_expert or (self.reset_optimizer and self.expert_pull == 0),
            "false where reset_optimizer is false or expert_pull is above 0 (residual_weight_decay pulls as well)",
        )
        self.require(
            "residual_weight_decay", self.shared_expert or self.residual_weight_decay == 0, "0 without shared_expert"
        )
