"""Settings of the methods that RbM is compared with. The defaults are those of each method's publication."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from rbm.config.distillation import EncodingConfig, ReliabilityConfig
from rbm.config.networks import Network, Pretrained
from rbm.config.section import (
    Count,
    CountOrZero,
    Experts,
    Float,
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


@section
class MoEConfig(Network, Pretrained):
    """The sparse mixture of experts with a learned cosine router: see :class:`rbm.nn.moe.MoELayer`.

    The defaults follow the paper's text. The released code uses one expert more than ``top_k`` (``extra_experts = 1``),
    normalises the gates over all experts (``gates_over = "all"``), and gives each expert a part of the rows in
    pretraining (``pretrain = "proportional"``), whereas the paper trains the first expert and clones it (``"first"``).
    """

    num_experts: Experts = NUM_EXPERTS
    top_k: int = TOP_K
    extra_experts: int = 0
    gates_over: Literal["selected", "all"] = "selected"
    noise: NonNegative = 1.0
    load_balance_weight: NonNegative = 0.01
    max_epochs: Count = 1000
    pretrain_epochs: CountOrZero = 50
    pretrain: Literal["first", "proportional"] = "first"

    def validate(self) -> None:
        self.require("top_k", 1 <= self.top_k <= self.num_experts, f"between 1 and num_experts={self.num_experts}")
        most = self.num_experts - self.top_k
        self.require("extra_experts", 0 <= self.extra_experts <= most, f"between 0 and num_experts - top_k={most}")


@section
class EnsembleConfig(Section):
    """Several MLP students (section ``mlp``) with different seeds, whose predicted probabilities are averaged."""

    members: Layers = 3


@section
class GLNNConfig(Network):
    """Graph-less neural network: see :mod:`rbm.distillation.methods.glnn`.

    ``label_weight`` is the weight of the pass over true labels. With a weight of zero, this pass is skipped.
    ``zero_weight_pass`` keeps it, as the released code does: Adam's momentum and weight decay then still change the
    student.
    """

    hidden_channels: Width = 128
    dropout: Probability = 0.3
    max_epochs: Count = 200
    batch_size: Count = 512
    label_weight: Share = 0.0
    zero_weight_pass: bool = False


@section
class NOSMOGConfig(GLNNConfig):
    """GLNN with positional encodings, adversarial inputs and similarity to the teacher's hidden layer: see
    :mod:`rbm.distillation.methods.nosmog`.

    Learning rate and weight decay are those that its code uses for every dataset. The code never reads the values in
    its configuration files. ``similarity_weight`` is the published one of ogbn-arxiv. The loss grows with the fourth
    power of the norm of hidden rows, and those of Cora (0.1) and PubMed (0.9) outweigh all else on CS, whose features
    are counts: with 0.1, NOSMOG had 64 % there instead of 87 % (experiments/searches/nosmog_cs.yaml).
    """

    adversarial_weight: NonNegative = 0.1
    adversarial_eps: Positive = 0.04
    adversarial_steps: Count = 5
    similarity_weight: NonNegative = 1e-6
    encoding: EncodingConfig = field(default_factory=EncodingConfig)


@section
class KRDConfig(Network):
    """Knowledge-inspired reliable distillation: see :mod:`rbm.distillation.methods.krd`.

    Until ``reliability.update_start_epoch``, all neighbours teach. From then on, neighbours are drawn by their
    reliability.
    """

    hidden_channels: Width = 512
    dropout: Probability = 0.4
    label_weight: Share = 0.2
    temperature: Positive = 1.0
    draw: Literal["expectation", "sample"] = "sample"
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)


@section
class CoHOpConfig(Network):
    """Contrastive learning and histograms of the labels around a node: see :mod:`rbm.distillation.methods.cohop`.

    One layer is the linear model that the publication uses on small and medium graphs. ``histogram`` is ``exact`` (by
    distances), ``propagation`` (by random walks, for large graphs), or ``none`` (features only). ``auto`` selects
    ``exact`` if its table of distances has at most 50 million entries, else ``propagation``.
    """

    num_layers: Annotated[int, Field(ge=1, le=2, description="1 (linear) or 2")] = 1
    hidden_channels: Width = 512
    norm: Annotated[Literal["none"], Field(description="none (with two layers, it always has BatchNorm)")] = "none"
    dropout: Probability = 0.0
    lr: Positive = 0.1
    max_epochs: Count = 200
    rounds: Count = 5
    threshold: Probability = 0.5
    contrast_weight: NonNegative = 0.02
    smoothing_radius: Annotated[Float, Field(gt=0, le=1)] = 0.4
    hops: Count = 10
    histogram: Literal["auto", "exact", "propagation", "none"] = "auto"
