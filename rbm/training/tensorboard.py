"""TensorBoard events: the figures of ``metrics.jsonl`` as event files in the folder ``tensorboard`` of a run.

Each phase (teacher, then each method) is one TensorBoard run, so that their curves appear in the same plots. The
scalars are ``loss``, ``accuracy/train``, ``accuracy/val``, ``accuracy/test`` and ``seconds``. A mixture that routes
also has ``expert_load/layerL/expertE``, the share of the gate mass that an expert receives from all nodes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rbm.training.run_files import list_file
from rbm.training.run_folder import RunFolder, read_metrics

# Seconds until written events reach the disk, so that a run can be watched.
_FLUSH_SECONDS = 5


def check_tensorboard() -> None:
    """Raise ModuleNotFoundError if tensorboard is not installed."""
    try:
        import tensorboard  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tensorboard is asked for and not installed: pip install 'rbm-kernels[tensorboard]'"
        ) from error


@contextmanager
def events(run: RunFolder) -> Iterator[None]:
    """Inside the block, also write the metrics of the run to TensorBoard, starting with those already in the folder."""
    list_file(run.path / "tensorboard")
    run.events = Events(run.path / "tensorboard")
    run.events.rewrite(read_metrics(run.path))
    try:
        yield
    finally:
        run.events.close()
        run.events = None


class Events:
    """Event files of a run, with one folder per phase."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writers: dict[str, Any] = {}

    def rewrite(self, records: list[dict[str, Any]]) -> None:
        """Replace all events by those of these lines of ``metrics.jsonl``."""
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
        """Flush everything to the disk and close the files."""
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
