"""A small valid graph with chosen faults, and files of it."""

from pathlib import Path

import numpy as np

NODES = 6
MASKS = ("train_mask", "val_mask", "test_mask")


def parts(**changes) -> dict[str, np.ndarray]:
    """A valid graph except for ``changes``; None removes a part."""
    place = np.arange(NODES)
    sound = {
        "x": np.ones((NODES, 2), np.float32),
        "edge_index": np.array([[0, 1, 2], [1, 2, 0]]),
        "y": place % 2,
        "train_mask": place < 2,
        "val_mask": (place >= 2) & (place < 4),
        "test_mask": place >= 4,
    }
    return {name: value for name, value in (sound | changes).items() if value is not None}


def write_npz(folder: Path, **changes) -> Path:
    np.savez(folder / "graph.npz", **parts(**changes))
    return folder / "graph.npz"


def write_folder(folder: Path, **changes) -> Path:
    for name, value in parts(**changes).items():
        np.save(folder / f"{name}.npy", value)
    return folder
