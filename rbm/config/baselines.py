"""The methods that RbM is compared with, each with the settings of its own publication as defaults."""

from dataclasses import dataclass, field

from rbm.config.distillation import EncodingConfig, ReliabilityConfig
from rbm.config.networks import Network
from rbm.config.section import Section


@dataclass(frozen=True)
class MoEConfig(Network):
    """The sparse mixture of experts with a learned cosine router: see :class:`rbm.nn.moe.MoELayer`.

    Defaults follow the paper's text. The released code uses one expert more than ``top_k`` (``extra_experts = 1``),
    gates that are shares of all experts (``gates_over = "all"``), and pretrains by giving each expert a part of the
    rows (``pretrain = "proportional"``) where the paper trains the first and clones it (``"first"``).
    """

    num_experts: int = 8
    top_k: int = 3
    extra_experts: int = 0
    gates_over: str = "selected"
    noise: float = 1.0
    load_balance_weight: float = 0.01
    max_epochs: int = 1000
    pretrain_epochs: int = 50
    pretrain: str = "first"

    def validate(self) -> None:
        super().validate()
        self.require("num_experts", self.num_experts >= 1, "at least 1")
        self.require("top_k", 1 <= self.top_k <= self.num_experts, f"between 1 and num_experts={self.num_experts}")
        most = self.num_experts - self.top_k
        self.require("extra_experts", 0 <= self.extra_experts <= most, f"between 0 and num_experts - top_k={most}")
        self.require("gates_over", self.gates_over in ("selected", "all"), "selected or all")
        self.require("pretrain", self.pretrain in ("first", "proportional"), "first or proportional")
        for name in ("noise", "load_balance_weight", "pretrain_epochs"):
            self.require(name, getattr(self, name) >= 0, "at least 0")


@dataclass(frozen=True)
class EnsembleConfig(Section):
    """Several MLP students (section ``mlp``) that differ in their seeds and vote by the mean of their probabilities."""

    members: int = 3

    def validate(self) -> None:
        self.require("members", self.members >= 1, "at least 1")


@dataclass(frozen=True)
class GLNNConfig(Network):
    """Graph-less neural network: see :mod:`rbm.distillation.methods.glnn`.

    ``label_weight`` is the weight of the true labels' pass. At zero that pass is left out; ``zero_weight_pass`` keeps
    it, as its code does, for what Adam's momentum and weight decay then do by themselves.
    """

    hidden_channels: int = 128
    dropout: float = 0.3
    max_epochs: int = 200
    batch_size: int = 512
    label_weight: float = 0.0
    zero_weight_pass: bool = False

    def validate(self) -> None:
        super().validate()
        self.require("batch_size", self.batch_size >= 1, "at least 1")
        self.require("label_weight", 0 <= self.label_weight <= 1, "between 0 and 1")


@dataclass(frozen=True)
class NOSMOGConfig(GLNNConfig):
    """GLNN with positions, disturbed inputs and similarity to the teacher's hidden layer: see
    :mod:`rbm.distillation.methods.nosmog`. Learning rate and weight decay are those that its code uses for every
    dataset; those in its configuration files it never reads.
    """

    adversarial_weight: float = 0.1
    adversarial_eps: float = 0.04
    adversarial_steps: int = 5
    similarity_weight: float = 0.1
    encoding: EncodingConfig = field(default_factory=EncodingConfig)

    def validate(self) -> None:
        super().validate()
        for name in ("adversarial_weight", "similarity_weight"):
            self.require(name, getattr(self, name) >= 0, "at least 0")
        self.require("adversarial_eps", self.adversarial_eps > 0, "a positive number")
        self.require("adversarial_steps", self.adversarial_steps >= 1, "at least 1")


@dataclass(frozen=True)
class KRDConfig(Network):
    """Knowledge-inspired reliable distillation: see :mod:`rbm.distillation.methods.krd`.

    Until ``reliability.update_start_epoch`` all neighbours teach; from there on those that are drawn by how reliable
    they are.
    """

    hidden_channels: int = 512
    dropout: float = 0.4
    label_weight: float = 0.2
    temperature: float = 1.0
    draw: str = "sample"
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)

    def validate(self) -> None:
        super().validate()
        self.require("label_weight", 0 <= self.label_weight <= 1, "between 0 and 1")
        self.require("temperature", self.temperature > 0, "a positive number")
        self.require("draw", self.draw in ("expectation", "sample"), "expectation or sample")


@dataclass(frozen=True)
class CoHOpConfig(Network):
    """Contrastive learning and histograms of the labels around a node: see :mod:`rbm.distillation.methods.cohop`.

    One layer is the linear model that it uses on small and medium graphs. ``histogram`` is ``exact`` (by distances),
    ``propagation`` (by random walks, for large graphs), or ``none``, which leaves features alone; ``auto`` takes the
    first while its table of distances has at most 50 million entries.
    """

    num_layers: int = 1
    hidden_channels: int = 512
    dropout: float = 0.0
    lr: float = 0.1
    max_epochs: int = 200
    rounds: int = 5
    threshold: float = 0.5
    contrast_weight: float = 0.02
    smoothing_radius: float = 0.4
    hops: int = 10
    histogram: str = "auto"

    def validate(self) -> None:
        super().validate()
        for name in ("rounds", "hops"):
            self.require(name, getattr(self, name) >= 1, "at least 1")
        self.require("num_layers", self.num_layers <= 2, "1 (linear) or 2")
        self.require("threshold", 0 <= self.threshold < 1, "at least 0 and below 1")
        self.require("contrast_weight", self.contrast_weight >= 0, "at least 0")
        self.require("smoothing_radius", 0 < self.smoothing_radius <= 1, "above 0 and at most 1")
        histograms = ("auto", "exact", "propagation", "none")
        self.require("histogram", self.histogram in histograms, f"one of {', '.join(histograms)}")
