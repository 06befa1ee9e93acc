"""Everything a run can be told, as one tree of dataclasses: typed, validated, written to and read from YAML.

Where the values of a named dataset and of a preset come from stands in :mod:`rbm.presets`.
"""

from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from rbm.losses import TEMPERATURE_MODES
from rbm.students import NORMS

SETTINGS = ("transductive", "inductive")
PROTOCOLS = ("rbm", "cpf")
EVALUATED = ("test", "validation")
PRESETS = ("clean", "paper", "official")
SPARSE_FEATURES = ("auto", "always", "never")


@dataclass(frozen=True)
class Section:
    """A part of the tree. Values are checked when it is built, with messages that name the key."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in fields(self):
            value = getattr(self, item.name)
            if is_dataclass(hints[item.name]):
                continue
            object.__setattr__(self, item.name, _typed(f"{self.section}{item.name}", value, hints[item.name]))
        self.validate()

    @property
    def section(self) -> str:
        name = type(self).__name__.removesuffix("Config").lower()
        return f"{name}." if name else ""

    def validate(self) -> None:
        """Raise ValueError where a value is out of range."""

    def require(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            raise ValueError(f"{self.section}{name} is {getattr(self, name)!r}, expected {expected}")


@dataclass(frozen=True)
class Network(Section):
    """What every trained network has: its shape, its optimiser (Adam, one step an epoch), and when it stops.

    Epochs before ``min_epochs`` are not selected, whatever their validation accuracy.
    """

    num_layers: int = 2
    hidden_channels: int = 128
    norm: str = "none"
    dropout: float = 0.3
    lr: float = 0.01
    weight_decay: float = 5e-4
    max_epochs: int = 500
    patience: int = 50
    min_epochs: int = 0

    def validate(self) -> None:
        for name in ("num_layers", "hidden_channels", "max_epochs", "patience"):
            self.require(name, getattr(self, name) >= 1, "at least 1")
        self.require("norm", self.norm in NORMS, f"one of {', '.join(NORMS)}")
        self.require("dropout", 0 <= self.dropout < 1, "at least 0 and below 1")
        self.require("lr", self.lr > 0, "a positive number")
        self.require("weight_decay", self.weight_decay >= 0, "at least 0")
        self.require("min_epochs", self.min_epochs >= 0, "at least 0")


@dataclass(frozen=True)
class TeacherConfig(Network):
    """The graph neural network: ``sage`` (mean aggregation with the node itself) or ``gcn``.

    In its first epochs a teacher may already order the classes well on a few hundred validation nodes while its soft
    labels are close to uniform; a student learns little from those. Hence ``min_epochs``.
    """

    name: str = "sage"
    dropout: float = 0.5
    min_epochs: int = 20


@dataclass(frozen=True)
class MLPConfig(Network):
    """The plain student that the RbM student is compared with. Depth, width and norm are those of the RbM student."""


@dataclass(frozen=True)
class StudentConfig(Network):
    """The RbM student.

    ``decay`` is the share of the old memory in each update, ``anneal_delta`` and ``anneal_steps`` are its schedule
    (Eq. 13); ``memory_weight_decay`` lets the optimiser's weight decay act on the memory vectors where the
    self-similarity loss trains them; ``kmeans_max_rows = 0`` means all rows.
    """

    num_experts: int = 8
    top_k: int = 3
    decay: float = 0.9
    anneal_delta: float = 0.0
    anneal_steps: int = 200
    input_attention: bool = True
    init_scale: float = 2.0
    init_attention: float = 1.1
    dropout_first_layer: bool = True
    detach_gates: bool = True
    gate_temperature: float = 1.0
    normalize_memory: bool = True
    normalize_memory_input: bool = True
    commitment_weight: float = 0.05
    self_similarity_weight: float = 0.01
    load_balance_weight: float = 0.01
    pretrain_epochs: int = 12
    reset_optimizer: bool = True
    memory_weight_decay: bool = False
    kmeans_max_rows: int = 0

    def validate(self) -> None:
        super().validate()
        self.require("num_experts", self.num_experts >= 1, "at least 1")
        self.require("top_k", 1 <= self.top_k <= self.num_experts, f"between 1 and num_experts={self.num_experts}")
        self.require("decay", 0 <= self.decay <= 1, "between 0 and 1")
        self.require("anneal_steps", self.anneal_steps >= 1, "at least 1")
        for name in ("gate_temperature", "init_scale", "init_attention"):
            self.require(name, getattr(self, name) > 0, "a positive number")
        for name in (
            "anneal_delta",
            "commitment_weight",
            "self_similarity_weight",
            "load_balance_weight",
            "pretrain_epochs",
            "kmeans_max_rows",
        ):
            self.require(name, getattr(self, name) >= 0, "at least 0")


@dataclass(frozen=True)
class DistillConfig(Section):
    """How soft and hard labels mix, and whose soft labels a node learns from.

    ``label_weight`` is the weight of the true labels, the teacher's get the rest. ``neighbors`` adds the soft labels of
    reliable neighbours (KRD); ``mean`` and ``draw`` are explained at :func:`rbm.soft_targets.weigh_pairs`.
    ``forward`` is ``node`` (one student forward a node, against one aggregated target) or ``pair`` (one a pair).

    ``batch_size = 0`` takes all rows at once. ``reduction`` is ``global_mean``, where batches add up to the means of
    the paper's equations, or ``sum_of_batch_means``, where every batch weighs alike, as in the released code: then hard
    and soft labels weigh by their numbers of batches as well. ``step_per_batch`` takes an optimiser step after every
    batch instead of one an epoch; ``shuffle`` draws the rows of batches anew each epoch.

    ``adversarial_weight`` adds the loss of inputs disturbed by projected gradient ascent (``adversarial_eps`` is the
    largest disturbance), ``similarity_weight`` that of :func:`rbm.losses.similarity_loss`; both are off at zero.
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
    """How far each neighbour's soft label is trusted: see :mod:`rbm.reliability`.

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
    """What a student sees of the graph beside a node's features: see :mod:`rbm.encodings`.

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
    relative_norm: float = 1.0

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


@dataclass(frozen=True)
class Config(Section):
    """A whole run. ``root`` is a dataset folder; ``preset`` is a record of where the values below started.

    ``protocol`` says which form of a named graph and which split are meant: see :func:`rbm.datasets.load_dataset`.
    ``evaluate_on = "validation"`` is for choosing settings: half of the validation nodes stand for the test set, which
    is taken away (see :func:`rbm.splits.without_test_set`).
    ``sparse_features`` says whether a named dataset's features come as a CSR tensor: see
    :func:`rbm.datasets.load_dataset`.
    """

    dataset: str = "digits"
    root: str = ""
    protocol: str = "rbm"
    evaluate_on: str = "test"
    sparse_features: str = "auto"
    setting: str = "transductive"
    preset: str = "clean"
    seed: int = 0
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    mlp: MLPConfig = field(default_factory=MLPConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)
    encoding: EncodingConfig = field(default_factory=EncodingConfig)

    def validate(self) -> None:
        self.require("setting", self.setting in SETTINGS, f"one of {', '.join(SETTINGS)}")
        self.require("protocol", self.protocol in PROTOCOLS, f"one of {', '.join(PROTOCOLS)}")
        self.require("evaluate_on", self.evaluate_on in EVALUATED, f"one of {', '.join(EVALUATED)}")
        self.require("preset", self.preset in PRESETS, f"one of {', '.join(PRESETS)}")
        choices = ", ".join(SPARSE_FEATURES)
        self.require("sparse_features", self.sparse_features in SPARSE_FEATURES, f"one of {choices}")
        self.require("seed", 0 <= self.seed < 2**31, "between 0 and 2^31 - 1")

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False)

    @classmethod
    def from_yaml(cls, path: Path | str) -> "Config":
        """Read a configuration that :meth:`to_yaml` wrote; raises as :func:`read_changes`."""
        return cls().updated(read_changes(path))

    def updated(self, changes: dict[str, Any]) -> "Config":
        """A copy with nested ``changes``, for example ``{"student": {"lr": 0.005}}``."""
        return _updated(self, changes, "")


def _updated(section: Any, changes: dict[str, Any], path: str) -> Any:
    known = {item.name for item in fields(section)}
    values = {}
    for key, value in changes.items():
        if key not in known:
            raise ValueError(f"unknown setting {path}{key}; known here: {', '.join(sorted(known))}")
        current = getattr(section, key)
        if is_dataclass(current):
            if not isinstance(value, dict):
                raise ValueError(f"{path}{key} is {value!r}, expected a section with keys such as lr")
            value = _updated(current, value, f"{path}{key}.")
        values[key] = value
    return replace(section, **values)


def _typed(name: str, value: Any, kind: type) -> Any:
    # YAML 1.1 reads 1e-7 as text, and so did the released hyperparameters; a number that is meant is taken as one.
    if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(f"{name} is {value!r} ({type(value).__name__}), expected {kind.__name__}")
    return value


def read_changes(path: Path | str) -> dict[str, Any]:
    """The settings that a YAML file changes, checked against the tree.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no YAML, an unknown key, or a value that does not fit.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"configuration file {path} does not exist")
    try:
        content = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, expected the sections of a configuration")
    Config().updated(content)
    return content


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two trees of changes in one; where both set a value, the second's counts."""
    both = dict(first)
    for key, value in second.items():
        nested = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if nested else value
    return both


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """Turn ``["student.lr=0.005"]`` into ``{"student": {"lr": 0.005}}``, values read as YAML."""
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"{assignment!r} is no assignment, expected SECTION.KEY=VALUE, such as student.lr=0.005")
        *sections, last = key.strip().split(".")
        target = changes
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = yaml.safe_load(value)
    return changes
