"""A run in TensorBoard: the figures of ``metrics.jsonl`` as event files in the run folder's ``tensorboard``.

Each phase (teacher, then each method) is a run of TensorBoard's, so that their curves lie over each other. Its scalars
are ``loss``, ``accuracy/train``, ``accuracy/val``, ``accuracy/test``, ``seconds``, and of a mixture that routes
``expert_load/layerL/expertE``, the share of the gates' mass that an expert receives from all nodes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rbm.training.run_files import list_file
from rbm.training.run_folder import RunFolder, read_metrics

# Seconds until written events reach the disk, where a run is watched.
_FLUSH_SECONDS = 5


def check_tensorboard(folder: Path | str | None) -> None:
    """Whether events can be written.

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
        ValueError: there is no run folder to write them into.
    """
    if folder is None:
        raise ValueError("tensorboard is True but folder is None; give the run a folder, its events stand in there")
    try:
        import tensorboard  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tensorboard is asked for and not installed: pip install 'rbm-kernels[tensorboard]'"
        ) from error


@contextmanager
def events(run: RunFolder) -> Iterator[None]:
    """Inside, what the run appends to its metrics goes to TensorBoard too; what it has there already goes first."""
    list_file(run.path / "tensorboard")
    run.events = Events(run.path / "tensorboard")
    run.events.rewrite(read_metrics(run.path))
    try:
        yield
    finally:
        run.events.close()
        run.events = None


class Events:
    """Event files of a run, a folder a phase."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writers: dict[str, Any] = {}

    def rewrite(self, records: list[dict[str, Any]]) -> None:
        """Write these lines of ``metrics.jsonl`` in the place of all that is there."""
        self.close()
        for file in self.folder.glob("*/events.out.tfevents.*"):
            file.unlink()
        for record in records:
            self.add(record)

    def add(self, record: dict[str, Any]) -> None:
        """Write one line of ``metrics.jsonl``."""
        from torch.utils.tensorboard import SummaryWriter

        phase, epoch = record["phase"], record["epoch"]
        if phase not in self._writers:
            self._writers[phase] = SummaryWriter(str(self.folder / phase), flush_secs=_FLUSH_SECONDS)
        for tag, value in _scalars(record):
            self._writers[phase].add_scalar(tag, value, epoch)

    def close(self) -> None:
        """Everything to the disk."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


def _scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name in ("loss", "seconds"):
        yield name, record[name]
    for name in ("train", "val", "test"):
        yield f"accuracy/{name}", record[f"{name}_accuracy"]
    for layer, shares in enumerate(record.get("expert_load") or []):
        for expert, share in enumerate(shares):
            yield f"expert_load/layer{layer}/expert{expert}", share
