"""How a student is taught: its losses, whose soft labels it trusts, and what it sees of the graph."""

from dataclasses import dataclass

from rbm.config.section import Section

TEMPERATURE_MODES = ("softmax", "scaled_log_probs")


@dataclass(frozen=True)
class DistillConfig(Section):
    """How soft and hard labels mix, and whose soft labels a node learns from.

    ``label_weight`` is the weight of the true labels, the teacher's get the rest. ``neighbors`` adds the soft labels of
    reliable neighbours (KRD); ``mean`` and ``draw`` are explained at :func:`rbm.distillation.soft_targets.weigh_pairs`.
    ``forward`` is ``node`` (one student forward a node, against one aggregated target) or ``pair`` (one a pair).

    ``batch_size = 0`` takes all rows at once. ``reduction`` is ``global_mean``, where batches add up to the means of
    the paper's equations, or ``sum_of_batch_means``, where every batch weighs alike, as in the released code: then hard
    and soft labels weigh by their numbers of batches as well. ``step_per_batch`` takes an optimiser step after every
    batch instead of one an epoch; ``shuffle`` draws the rows of batches anew each epoch.

    ``adversarial_weight`` adds the loss of inputs disturbed by projected gradient ascent (``adversarial_eps`` is the
    largest disturbance), ``similarity_weight`` that of :func:`rbm.nn.losses.similarity_loss`; both are off at zero.
    """

    label_weight: float = 0.2
    temperature: float = 1.0
    temperature_mode: str = "softmax"
    temperature_squared: bool = False
    neighbors: bool = True
    mean: str = "nodes"
    draw: str = "expectation"
    forward: str = "node"
    batch_size: int = 0
    reduction: str = "global_mean"
    step_per_batch: bool = False
    shuffle: bool = True
    adversarial_weight: float = 0.0
    adversarial_eps: float = 0.04
    adversarial_steps: int = 5
    update_memory_on_adversarial: bool = False
    similarity_weight: float = 0.0

    def validate(self) -> None:
        self.require("label_weight", 0 <= self.label_weight <= 1, "between 0 and 1")
        for name in ("temperature", "adversarial_eps"):
            self.require(name, getattr(self, name) > 0, "a positive number")
        for name, choices in (
            ("temperature_mode", TEMPERATURE_MODES),
            ("mean", ("nodes", "pairs")),
            ("draw", ("expectation", "sample")),
            ("forward", ("node", "pair")),
            ("reduction", ("global_mean", "sum_of_batch_means")),
        ):
            self.require(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        for name in ("batch_size", "adversarial_weight", "similarity_weight"):
            self.require(name, getattr(self, name) >= 0, "at least 0")
        self.require("adversarial_steps", self.adversarial_steps >= 1, "at least 1")


@dataclass(frozen=True)
class ReliabilityConfig(Section):
    """How far each neighbour's soft label is trusted: see :mod:`rbm.distillation.reliability`.

    The exponent is learned after epoch ``update_start_epoch`` and every ``update_every`` epochs from there;
    ``power_momentum`` is the share of the old one.
    """

    noise_std: float = 1.0
    num_samples: int = 1
    squared: bool = False
    init_power: float = 1.0
    power_momentum: float = 0.99
    update_start_epoch: int = 50
    update_every: int = 1
    num_bins: int = 50
    bin_offset: str = "released"
    ignore_empty_bins: bool = False

    def validate(self) -> None:
        for name in ("noise_std", "init_power"):
            self.require(name, getattr(self, name) > 0, "a positive number")
        for name in ("num_samples", "update_every"):
            self.require(name, getattr(self, name) >= 1, "at least 1")
        self.require("num_bins", self.num_bins >= 2, "at least 2")
        self.require("update_start_epoch", self.update_start_epoch >= 0, "at least 0")
        self.require("power_momentum", 0 <= self.power_momentum <= 1, "between 0 and 1")
        self.require("bin_offset", self.bin_offset in ("released", "center"), "released or center")


@dataclass(frozen=True)
class EncodingConfig(Section):
    """What a student sees of the graph beside a node's features: see :mod:`rbm.datasets.encodings`.

    ``deepwalk`` appends ``embedding_dim`` coordinates learned from random walks (``walk_length`` nodes each), in which
    unseen nodes are placed by their neighbours (``fill``); ``label_propagation`` appends class shares of the training
    labels around a node.

    ``relative_norm`` scales each of the two until its rows are on average so many times as long as the features' (0
    leaves them as they are). Coordinates of walks are far longer than row-normalised features and far shorter than
    Amazon's, and cosines see the longer part alone.
    """

    deepwalk: bool = True
    label_propagation: bool = False
    walk_length: int = 50
    walks_per_node: int = 5
    window_size: int = 5
    epochs: int = 1
    embedding_dim: int = 64
    negative: int = 5
    hierarchical_softmax: bool = True
    workers: int = 1
    fill: str = "observed_mean"
    propagation_decay: float = 0.1
    propagation_hops: int = 10
    exclude_self: bool = False
    self_loops: bool = False
    relative_norm: float = 0.0

    def validate(self) -> None:
        for name in (
            *("walk_length", "walks_per_node", "window_size", "epochs", "embedding_dim", "workers"),
            "propagation_hops",
        ):
            self.require(name, getattr(self, name) >= 1, "at least 1")
        self.require("negative", self.negative >= 0, "at least 0")
        self.require("hierarchical_softmax", self.hierarchical_softmax or self.negative > 0, "true where negative is 0")
        self.require("fill", self.fill in ("observed_mean", "all_mean"), "observed_mean or all_mean")
        self.require("relative_norm", self.relative_norm >= 0, "at least 0")
        self.require("propagation_decay", 0 < self.propagation_decay <= 1, "above 0 and at most 1")
