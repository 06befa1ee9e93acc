"""Settings of students and alternatives published since 2024. Defaults are those of the publications, if they exist."""

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

    ``scheme`` is ``mixup`` (the publication's best) or ``weight``. ``rate`` sets how strongly a node's hardness makes
    it use its neighbours; it falls to a hundredth of this value over ``max_epochs``. ``beta`` is the parameter of the
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

    ``label_weight`` is the weight of the true labels; the teacher's soft labels get the rest. ``hops = 0`` is an MLP on
    features alone. The settings are ours: the publications have none for small graphs with few labels.
    """

    hidden_channels: Width = 128
    dropout: Probability = 0.5
    hops: CountOrZero = 3
    label_weight: Share = 1.0


@section
class TreesConfig(Section):
    """Gradient-boosted trees: see :mod:`rbm.distillation.methods.trees`.

    ``targets`` is ``labels`` (the true labels only) or ``teacher`` (also the teacher's most likely class for every
    other node). An epoch is a boosting round with one tree per class. ``lr`` shrinks the trees, which have at most
    ``leaves`` leaves of at least ``min_samples`` nodes each and are at most ``depth`` levels deep. The settings are
    ours.
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

    The student has the teacher's width and layers: ``hidden_channels`` and ``num_layers`` are not read. Copied
    parameters are trained at ``injected_lr`` times ``lr``. ``energy_weight`` is the weight of the energy loss.
    ``energy_log`` compares the logarithms of the energy ratios instead of the ratios, and a share ``energy_share`` of
    the edges is drawn in each step.
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
    """TINED with encodings, adversarial inputs and similarity to the teacher's hidden layer, as in NOSMOG.

    ``similarity_weight`` is as in :class:`~rbm.config.baselines.NOSMOGConfig`.
    """

    adversarial_weight: NonNegative = 0.1
    adversarial_eps: Positive = 0.04
    adversarial_steps: Count = 5
    similarity_weight: NonNegative = 1e-6
    encoding: EncodingConfig = field(default_factory=EncodingConfig)


@section
class TokenizerConfig(Network):
    """The GNN with a codebook that teaches VQGraph's student: see :mod:`rbm.distillation.methods.vqgraph`.

    It has two convolutions and no norm. The codebook has ``codebook_size`` codes with ``code_channels`` channels,
    updated with ``decay`` from the rows assigned to them. ``code_start`` is ``random`` (random unit vectors, as in the
    released code) or ``rows`` (rows of the graph). ``node_weight``, ``edge_weight`` and ``commitment_weight`` are the
    weights of the losses that are added to that of the labels: the reconstruction of nodes and of edges, and the
    distance between rows and their codes.
    """

    num_layers: Annotated[int, Field(ge=2, le=2, description="2 (its convolutions)")] = 2
    hidden_channels: Width = 128
    norm: Annotated[Literal["none"], Field(description="none")] = "none"
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

    ``code_weight`` is the weight of the pass over codes, and ``code_temperature`` the temperature of both soft
    assignments.
    """

    label_weight: Share = 0.0
    max_epochs: Count = 500
    code_weight: NonNegative = 1e-8
    code_temperature: Positive = 4.0
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)


@section
class SimMLPConfig(Network):
    """Alignment without labels, then a linear head: see :mod:`rbm.distillation.methods.simmlp`.

    ``num_layers`` to ``patience`` are for the MLP and the alignment. ``propagation_layers`` is the number of layers of
    the graph view, and ``predictor_layers``, ``predictor_channels`` and ``predictor_dropout`` describe the predictor
    that maps the MLP's rows to that view. ``feature_mask`` and ``edge_mask`` are the shares masked in each epoch,
    ``power`` is the exponent of the distance, and ``reconstruction_weight`` is the weight of the reconstruction of the
    features. ``head_lr`` to ``head_patience`` are for the linear head.
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
