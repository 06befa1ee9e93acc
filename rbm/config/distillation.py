"""Settings of the distillation: losses, the source of the soft labels, and the encodings that a student sees."""

from typing import Annotated, Literal

from pydantic import Field

from rbm.config.section import Count, CountOrZero, Float, NonNegative, Positive, Section, Share, Width, section


@section
class DistillConfig(Section):
    """How soft and hard labels are combined, and which soft labels a node learns from.

    ``label_weight`` is the weight of the true labels; the soft labels get the rest. ``neighbors`` adds the soft labels
    of reliable neighbours (KRD); ``auto`` does so unless the graph is heterophilous or its edges follow classes little
    more than by chance (:mod:`rbm.distillation.neighbor_labels`). ``source`` selects the soft labels: ``teacher``, or
    ``auto``, which uses those of an MLP trained on the labels alone if it beats the teacher on validation nodes by more
    than chance (:mod:`rbm.distillation.source`). ``mean`` and ``draw`` are explained at
    :func:`rbm.distillation.soft_targets.weigh_pairs`. ``forward`` is ``node`` (one student forward per node, against
    one aggregated target) or ``pair`` (one per pair).

    ``batch_size = 0`` uses all nodes at once, and with ``forward = "pair"`` as many pairs as there are nodes, like the
    released code. With ``reduction = "global_mean"``, the batches add up to the means of the paper's equations. With
    ``"sum_of_batch_means"``, every batch has the same weight, as in the released code; the weights of hard and soft
    labels then also depend on their numbers of batches. ``step_per_batch`` takes an optimiser step after every batch
    instead of one per epoch. ``shuffle`` draws the rows of the batches anew in each epoch.

    ``adversarial_weight`` adds the loss on inputs perturbed by projected gradient ascent (``adversarial_eps`` is the
    largest perturbation), and ``similarity_weight`` adds :func:`rbm.nn.losses.similarity_loss`. Zero turns either off.
    """

    label_weight: Share = 0.2
    temperature: Positive = 1.0
    temperature_mode: Literal["softmax", "scaled_log_probs"] = "softmax"
    temperature_squared: bool = False
    neighbors: Annotated[Literal[True, False, "auto"], Field(description="true, false or auto")] = "auto"
    source: Literal["teacher", "auto"] = "auto"
    mean: Literal["nodes", "pairs"] = "nodes"
    draw: Literal["expectation", "sample"] = "expectation"
    forward: Literal["node", "pair"] = "node"
    batch_size: CountOrZero = 0
    reduction: Literal["global_mean", "sum_of_batch_means"] = "global_mean"
    step_per_batch: bool = False
    shuffle: bool = True
    adversarial_weight: NonNegative = 0.0
    adversarial_eps: Positive = 0.04
    adversarial_steps: Count = 5
    update_memory_on_adversarial: bool = False
    similarity_weight: NonNegative = 0.0


@section
class ReliabilityConfig(Section):
    """How much each neighbour's soft label is trusted: see :mod:`rbm.distillation.reliability`.

    The exponent is updated after epoch ``update_start_epoch`` and then every ``update_every`` epochs;
    ``power_momentum`` is the share of the old exponent.
    """

    noise_std: Positive = 1.0
    num_samples: Count = 1
    squared: bool = False
    init_power: Positive = 1.0
    power_momentum: Share = 0.99
    update_start_epoch: CountOrZero = 50
    update_every: Count = 1
    num_bins: Annotated[int, Field(ge=2)] = 50
    bin_offset: Literal["released", "center"] = "released"
    ignore_empty_bins: bool = False


@section
class EncodingConfig(Section):
    """What a student sees of the graph in addition to a node's features: see :mod:`rbm.datasets.encodings`.

    ``deepwalk`` appends ``embedding_dim`` coordinates learned from random walks (``walk_length`` nodes each). Unseen
    nodes get coordinates from their neighbours (``fill``). ``label_propagation`` appends class shares of the training
    labels around a node.

    ``relative_norm`` scales each of the two encodings so that the mean norm of its rows is this multiple of the
    features' mean norm (0: no scaling). DeepWalk coordinates are far longer than row-normalised features and far
    shorter than Amazon's, and the longer part dominates a cosine.
    """

    deepwalk: bool = True
    label_propagation: bool = False
    walk_length: Annotated[int, Field(ge=2, le=10_000)] = 50
    walks_per_node: Count = 5
    window_size: Count = 5
    epochs: Count = 1
    embedding_dim: Width = 64
    negative: CountOrZero = 5
    hierarchical_softmax: bool = True
    workers: Count = 1
    fill: Literal["observed_mean", "all_mean"] = "observed_mean"
    propagation_decay: Annotated[Float, Field(gt=0, le=1)] = 0.1
    propagation_hops: Count = 10
    exclude_self: bool = False
    self_loops: bool = False
    relative_norm: NonNegative = 0.0

    def validate(self) -> None:
        self.require("hierarchical_softmax", self.hierarchical_softmax or self.negative > 0, "true where negative is 0")
