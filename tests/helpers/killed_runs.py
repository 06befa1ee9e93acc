"""Distillations that are killed in a given epoch of a phase and resumed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch_geometric.data import Data

import rbm
from rbm.distillation.distill import Distillation
from rbm.training import loop
from rbm.training.run_folder import RunFolder


@contextmanager
def killed_at(phase: str, epoch: int, *, checkpoint_seconds: float = -1.0) -> Iterator[None]:
    """Interrupt a distillation in the block before ``epoch`` of ``phase`` is recorded; the block ends there.

    Checkpoints are ``checkpoint_seconds`` apart, by default after every epoch.
    """
    append = RunFolder.append_metrics

    def append_or_interrupt(run: RunFolder, record: dict[str, Any]) -> None:
        if (record["phase"], record["epoch"]) == (phase, epoch):
            raise KeyboardInterrupt
        append(run, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "CHECKPOINT_SECONDS", checkpoint_seconds)
        patch.setattr(RunFolder, "append_metrics", append_or_interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield


def killed_and_resumed(data: Data, folder: Path, phase: str, epoch: int, **options: Any) -> Distillation:
    """Run ``rbm.distill`` with checkpoints in every epoch, kill it before an epoch is recorded, and resume it."""
    with killed_at(phase, epoch):
        rbm.distill(data, folder=folder, **options)
    return rbm.distill(data, folder=folder, resume=True, **options)
