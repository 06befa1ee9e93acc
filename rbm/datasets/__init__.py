"""Graphs: the ones the package knows by name, and checks for everyone else's."""

from rbm.datasets.load import load_dataset
from rbm.datasets.registry import DATASETS, DatasetInfo, find_dataset
from rbm.datasets.validation import num_classes, validate_data

__all__ = ["DATASETS", "DatasetInfo", "find_dataset", "load_dataset", "num_classes", "validate_data"]
