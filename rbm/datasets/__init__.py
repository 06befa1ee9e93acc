"""Graphs: datasets that the package loads by name, users' own graphs from files, and checks for both."""

from importlib import import_module

# The readers need PyTorch Geometric, which takes longer to import than PyTorch. Predictions need the encodings alone.
_LAZY = {
    "DATASETS": "registry",
    "DatasetInfo": "registry",
    "check_files": "load",
    "dataset_name": "registry",
    "find_dataset": "registry",
    "load_dataset": "load",
    "load_graph": "user_graph",
    "num_classes": "validation",
    "unseen_fraction": "registry",
    "validate_data": "validation",
}

__all__ = [*_LAZY]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'rbm.datasets' has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
