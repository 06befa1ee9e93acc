"""Graphs: datasets that the package loads by name, users' own graphs from files, and checks for both."""

from rbm.datasets.load import check_files, load_dataset
from rbm.datasets.registry import DATASETS, DatasetInfo, dataset_name, find_dataset, unseen_fraction
from rbm.datasets.user_graph import load_graph
from rbm.datasets.validation import num_classes, validate_data

__all__ = [
    "DATASETS",
    "DatasetInfo",
    "check_files",
    "dataset_name",
    "find_dataset",
    "load_dataset",
    "load_graph",
    "num_classes",
    "unseen_fraction",
    "validate_data",
]
