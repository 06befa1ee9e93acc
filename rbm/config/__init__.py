"""All settings of a run as one tree of dataclasses: typed, checked by pydantic, read from YAML and written to it.

:mod:`rbm.config.presets` describes where the values for a named dataset and for a preset come from.
"""

from rbm.config.baselines import CoHOpConfig, EnsembleConfig, GLNNConfig, KRDConfig, MoEConfig, NOSMOGConfig
from rbm.config.distillation import DistillConfig, EncodingConfig, ReliabilityConfig
from rbm.config.networks import (
    ATTENTION_TEACHERS,
    AttentionConfig,
    MLPConfig,
    Network,
    RbMConfig,
    SamplingConfig,
    TeacherConfig,
)
from rbm.config.newer import (
    HGMDConfig,
    SIGNConfig,
    SimMLPConfig,
    TINEDConfig,
    TINEDPlusConfig,
    TokenizerConfig,
    TreesConfig,
    VQGraphConfig,
)
from rbm.config.tree import (
    LATER_SETTINGS,
    PRESETS,
    PROTOCOLS,
    SETTINGS,
    SPARSE_FEATURES,
    Config,
    as_text,
    differences,
    flat,
    merged,
    nested,
    parse_assignments,
    read_changes,
)

__all__ = [
    "ATTENTION_TEACHERS",
    "LATER_SETTINGS",
    "PRESETS",
    "PROTOCOLS",
    "SETTINGS",
    "SPARSE_FEATURES",
    "AttentionConfig",
    "CoHOpConfig",
    "Config",
    "DistillConfig",
    "EncodingConfig",
    "EnsembleConfig",
    "GLNNConfig",
    "HGMDConfig",
    "KRDConfig",
    "MLPConfig",
    "MoEConfig",
    "NOSMOGConfig",
    "Network",
    "RbMConfig",
    "ReliabilityConfig",
    "SIGNConfig",
    "SamplingConfig",
    "SimMLPConfig",
    "TINEDConfig",
    "TINEDPlusConfig",
    "TeacherConfig",
    "TokenizerConfig",
    "TreesConfig",
    "VQGraphConfig",
    "as_text",
    "differences",
    "flat",
    "merged",
    "nested",
    "parse_assignments",
    "read_changes",
]
