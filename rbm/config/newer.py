"""Students and alternatives published since 2024, each with the settings of its own publication as defaults."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from rbm.config.baselines import GLNNConfig
from rbm.config.distillation import EncodingConfig
from rbm.config.networks import Network
from rbm.config.section import (
    Count,
    CountOrZero,
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


@section
class HGMDConfig(Network):
    """Hardness-aware distillation: see :mod:`rbm.distillation.methods.hgmd`.

    ``scheme`` is ``mixup`` (the publication's best) or ``weight``. ``rate`` is the first value of the rate at which
    hardness makes a node take neighbours, which falls to a hundredth over ``max_epochs``; ``beta`` the parameter of the
    Beta distribution that mixup draws from.
    """

    hidden_channels: Width = 512
    dropout: Probability = 0.5
    label_weight: Share = 0.1
    temperature: Positive = 1.0
    scheme: Literal["mixup", "weight"] = "mixup"
    rate: Positive = 5.0
    beta: Positive = 0.4


@section
class SIGNConfig(Network):
    """Features of 0 to ``hops`` edges away, computed before training: see :mod:`rbm.distillation.methods.sign`.

    ``label_weight`` is the weight of the true labels, the teacher's soft labels get the rest. No ``hops`` leave an MLP
    on features alone. The settings are ours: the publications have none for few labels on small graphs.
    """

    hidden_channels: Width = 128
    dropout: Probability = 0.5
    hops: CountOrZero = 3
    label_weight: Share = 1.0


@section
class TreesConfig(Section):
    """Gradient-boosted trees: see :mod:`rbm.distillation.methods.trees`.

    ``targets`` says what they learn: ``labels``, the true ones alone; or ``teacher``, beside these its most likely
    class of every other node. A round of boosting, one tree for each class, is an epoch; ``lr`` shrinks its trees,
    which have at most ``leaves`` leaves, ``depth`` steps down, of at least ``min_samples`` nodes. Settings are ours.
    """

    targets: Literal["labels", "teacher"] = "teacher"
    lr: Positive = 0.1
    leaves: Annotated[int, Field(ge=2, le=2**15)] = 31
    depth: Annotated[int, Field(ge=1, le=100)] = 6
    min_samples: Count = 5
    l2: NonNegative = 0.0
    max_epochs: Annotated[int, Field(ge=1, le=10_000)] = 100
    patience: Count = 20
    min_epochs: CountOrZero = 0


@section
class TINEDConfig(GLNNConfig):
    """Teacher injection and Dirichlet energies: see :mod:`rbm.distillation.methods.tined`.

    The student's width and layers are the teacher's: ``hidden_channels`` and ``num_layers`` are not read. What was
    copied learns at ``injected_lr`` times ``lr``. ``energy_weight`` is the weight of the energies' step, ``energy_log``
    compares logarithms of ratios and not the ratios, and ``energy_share`` of the edges are drawn for each.
    """

    dropout: Probability = 0.0
    max_epochs: Count = 500
    lr: Positive = 0.005
    injected_lr: NonNegative = 0.1
    propagation_init: Literal["identity", "random"] = "identity"
    energy_weight: NonNegative = 0.1
    energy_log: bool = True
    energy_share: Annotated[Float, Field(gt=0, le=1)] = 1.0


@section
class TINEDPlusConfig(TINEDConfig):
    """TINED with positions, disturbed inputs and similarity to the teacher's hidden layer, as in NOSMOG."""

    adversarial_weight: NonNegative = 0.1
    adversarial_eps: Positive = 0.04
    adversarial_steps: Count = 5
    similarity_weight: NonNegative = 0.001
    encoding: EncodingConfig = field(default_factory=EncodingConfig)


@section
class TokenizerConfig(Network):
    """The GNN with a codebook that teaches VQGraph's student: see :mod:`rbm.distillation.methods.vqgraph`.

    ``codebook_size`` codes of ``code_channels`` numbers follow the rows that take them with ``decay``. ``code_start``
    says what they are before: unit vectors drawn at ``random``, as in the released code, or ``rows`` of the graph.
    ``node_weight``, ``edge_weight`` and ``commitment_weight`` are the weights of what codes lose of nodes and of edges,
    and of how far rows are from their codes, beside the labels.
    """

    hidden_channels: Width = 128
    dropout: Probability = 0.5
    max_epochs: Count = 200
    code_channels: Width = 128
    codebook_size: Annotated[int, Field(ge=1, le=2**17)] = 5000
    decay: Probability = 0.8
    code_start: Literal["random", "rows"] = "rows"
    node_weight: NonNegative = 0.001
    edge_weight: NonNegative = 0.03
    commitment_weight: NonNegative = 0.25


@section
class VQGraphConfig(GLNNConfig):
    """Soft labels and codes of a tokenizer: see :mod:`rbm.distillation.methods.vqgraph`.

    ``code_weight`` is the weight of the pass on codes, ``code_temperature`` that of both soft assignments.
    """

    label_weight: Share = 0.0
    max_epochs: Count = 500
    code_weight: NonNegative = 1e-8
    code_temperature: Positive = 4.0
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)


@section
class SimMLPConfig(Network):
    """Alignment without labels, then a linear head: see :mod:`rbm.distillation.methods.simmlp`.

    ``num_layers`` to ``patience`` are the MLP's and the alignment's, ``propagation_layers`` its view of the graph,
    ``predictor_layers``, ``predictor_channels`` and ``predictor_dropout`` what brings the MLP's rows beside that view.
    ``feature_mask`` and ``edge_mask`` are the shares that an epoch leaves out; ``power`` is the exponent of the
    distance, ``reconstruction_weight`` the weight of the features that shall be found again. ``head_lr`` to
    ``head_patience`` are those of the head.
    """

    hidden_channels: Width = 512
    norm: Literal["none", "batch", "layer"] = "batch"
    dropout: Probability = 0.5
    lr: Positive = 0.001
    weight_decay: NonNegative = 0.0
    max_epochs: Count = 1000
    patience: Count = 1000
    propagation_layers: Layers = 2
    predictor_layers: Layers = 2
    predictor_channels: Width = 512
    predictor_dropout: Probability = 0.0
    feature_mask: Probability = 0.25
    edge_mask: Probability = 0.25
    reconstruction_weight: NonNegative = 10.0
    power: Positive = 1.0
    head_lr: Positive = 0.01
    head_weight_decay: NonNegative = 0.0
    head_epochs: Count = 5000
    head_patience: Count = 500
