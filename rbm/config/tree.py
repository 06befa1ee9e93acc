"""The configuration of one run: all sections in one tree, read from YAML and written to it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field

from rbm.config.baselines import CoHOpConfig, EnsembleConfig, GLNNConfig, KRDConfig, MoEConfig, NOSMOGConfig
from rbm.config.distillation import DistillConfig, EncodingConfig, ReliabilityConfig
from rbm.config.networks import ATTENTION_TEACHERS, AttentionConfig, MLPConfig, RbMConfig, SamplingConfig, TeacherConfig
from rbm.config.newer import (
    HGMDConfig,
    SIGNConfig,
    SimMLPConfig,
    TINEDConfig,
    TINEDPlusConfig,
    TreesConfig,
    VQGraphConfig,
)
from rbm.config.section import Section, section, shown, updated
from rbm.utils.files import parse_yaml, read_yaml

Setting = Literal["transductive", "inductive"]
Protocol = Literal["rbm", "cpf"]
Evaluated = Literal["test", "validation"]
Preset = Literal["clean", "paper", "official"]
SparseFeatures = Literal["auto", "always", "never"]
Precision = Annotated[
    Literal["float32", "bfloat16"],
    Field(description="float32 or bfloat16 (float16 would need a scaled loss, which this package does not have)"),
]
SETTINGS, PROTOCOLS, PRESETS = get_args(Setting), get_args(Protocol), get_args(Preset)
SPARSE_FEATURES = get_args(SparseFeatures)
# Settings added later, with the value that all earlier runs had. A run file that lacks them is read with these values.
# The fingerprint of a result row ignores settings with these values, so that earlier rows keep their fingerprints.
LATER_SETTINGS: dict[str, Any] = {
    "undirected": False,
    "precision": "float32",
    "rbm": {
        "select_pretraining": False,
        "route_from_best": False,
        "memory_init": "kmeans",
        "expert_pull": 0.0,
        "routed_lr": 1.0,
        "shared_expert": False,
        "residual_weight_decay": 0.0,
        "reset_dead_experts": 0,
        "start_as_mlp": False,
    },
    "distill": {"source": "teacher"},
    "vqgraph": {"tokenizer": {"code_start": "random"}},
}


@section
class Config(Section):
    """The configuration of a run.

    ``root`` is a dataset folder. ``preset`` records which preset the values started from.
    ``protocol`` selects the version and the split of a named graph: see :func:`rbm.datasets.load_dataset`.
    ``evaluate_on = "validation"`` is for choosing settings: the test set is removed, and half of the validation nodes
    replace it (see :func:`rbm.datasets.splits.without_test_set`).
    ``inflate`` multiplies the hidden width of every student; 8 gives the paper's "+" variants.
    ``sparse_features`` selects whether a named dataset's features are loaded as a CSR tensor: see
    :func:`rbm.datasets.load_dataset`. ``undirected`` adds the reverse of each edge of a graph from a user's files.
    ``precision = "bfloat16"`` is mixed precision: the forwards of training steps and evaluations run under autocast.
    Weights, optimiser, losses, and the finished models stay in float32 (:mod:`rbm.utils.precision`).

    The students ``rbm``, ``mlp``, ``moe`` and ``ensemble`` share one training recipe, given by ``distill``,
    ``reliability`` and ``encoding``. The other methods have their own recipes in the sections of their names.
    ``attention`` is for the teachers ``revgat`` and ``drgat``, and ``sampling`` for teachers trained in batches.
    """

    dataset: str = "digits"
    root: str = ""
    protocol: Protocol = "rbm"
    evaluate_on: Evaluated = "test"
    sparse_features: SparseFeatures = "auto"
    undirected: bool = False
    setting: Setting = "transductive"
    preset: Preset = "clean"
    precision: Precision = "float32"
    seed: Annotated[int, Field(ge=0, lt=2**31, description="between 0 and 2^31 - 1")] = 0
    inflate: Annotated[int, Field(ge=1, le=1024, description="at least 1 and at most 1024")] = 1
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    mlp: MLPConfig = field(default_factory=MLPConfig)
    rbm: RbMConfig = field(default_factory=RbMConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)
    encoding: EncodingConfig = field(default_factory=EncodingConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    glnn: GLNNConfig = field(default_factory=GLNNConfig)
    krd: KRDConfig = field(default_factory=KRDConfig)
    nosmog: NOSMOGConfig = field(default_factory=NOSMOGConfig)
    cohop: CoHOpConfig = field(default_factory=CoHOpConfig)
    hgmd: HGMDConfig = field(default_factory=HGMDConfig)
    tined: TINEDConfig = field(default_factory=TINEDConfig)
    tined_plus: TINEDPlusConfig = field(default_factory=TINEDPlusConfig)
    simmlp: SimMLPConfig = field(default_factory=SimMLPConfig)
    vqgraph: VQGraphConfig = field(default_factory=VQGraphConfig)
    sign: SIGNConfig = field(default_factory=SIGNConfig)
    trees: TreesConfig = field(default_factory=TreesConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    @property
    def teacher_sections(self) -> tuple[str, ...]:
        """The sections that a trained teacher depends on: ``teacher``, and others only if they affect the result."""
        extra = {"attention": self.teacher.name in ATTENTION_TEACHERS, "sampling": self.sampling.batch_size > 0}
        return ("teacher", *(name for name, applies in extra.items() if applies))

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False)

    @classmethod
    def from_yaml(cls, path: Path | str) -> "Config":
        """Read a configuration that :meth:`to_yaml` of this or an earlier version wrote.

        Raises the errors of :func:`read_changes` and :meth:`updated`, with the file in their messages.
        """
        try:
            return cls().updated(LATER_SETTINGS).updated(read_changes(path))
        except ValueError as error:
            raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from error

    def updated(self, changes: dict[str, Any]) -> "Config":
        """A copy with nested ``changes``, for example ``{"rbm": {"lr": 0.005}}``."""
        if not isinstance(changes, Mapping):
            raise TypeError(f"changes is {shown(changes)}, expected settings by name: {{'rbm': {{'lr': 0.005}}}}")
        return updated(self, changes, "")


def read_changes(path: Path | str) -> dict[str, Any]:
    """Read the settings that a YAML file changes. Sections are checked when :meth:`Config.updated` applies them, since
    it depends on the changed configuration whether values fit together.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: invalid YAML, or an unknown key or an invalid value outside of the sections.
    """
    content = read_yaml("configuration file", path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, expected the sections of a configuration")
    start = Config()
    start.updated({key: v for key, v in content.items() if not (isinstance(v, dict) and _is_section(start, key))})
    return content


def _is_section(config: Config, key: str) -> bool:
    return isinstance(getattr(config, key, None), Section)


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge two trees of changes; if both set a value, the second wins."""
    both = dict(first)
    for key, value in second.items():
        nested = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if nested else value
    return both


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """Turn ``["rbm.lr=0.005"]`` into ``{"rbm": {"lr": 0.005}}``, reading values as YAML."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not (equals and key.strip()):
            raise ValueError(f"{shown(assignment)} is no assignment, expected SECTION.KEY=VALUE, such as rbm.lr=0.005")
        try:
            values[key.strip()] = parse_yaml(value)
        except ValueError as error:
            raise ValueError(f"{shown(assignment)} has a value that is not valid YAML: {error}") from error
    return nested(values)


def flat(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    """The leaves of a tree by their dotted names: the inverse of :func:`nested`."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return leaves


def differences(stored: dict[str, Any], given: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The leaves in which two trees differ: name and both values, ``absent`` for a leaf that a tree lacks."""
    was, now = flat(stored), flat(given)
    for name in {**now, **was}:
        values = was.get(name, "absent"), now.get(name, "absent")
        if values[0] != values[1]:
            yield name, *values


def as_text(value: Any) -> str:
    """A setting in a message, as YAML writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Turn ``{"rbm.lr": 0.01}`` into the tree ``{"rbm": {"lr": 0.01}}``; values that are trees are merged into it."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *outer, last = name.split(".")
        branch = tree
        for part in outer:
            branch = branch.setdefault(part, {})
            if not isinstance(branch, dict):
                raise ValueError(f"{name} is set, and {part} to {branch!r} as a whole; expected one of them")
        branch |= merged(branch, {last: value})
    return tree
