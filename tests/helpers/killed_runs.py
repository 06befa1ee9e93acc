"""A distillation that is killed in an epoch of the RbM student, and resumed."""

from pathlib import Path
from typing import Any

import pytest
from torch_geometric.data import Data

import rbm
from rbm.distillation.distill import Distillation
from rbm.training import loop
from rbm.training.run_folder import RunFolder


def killed_and_resumed(
    data: Data, folder: Path, monkeypatch: pytest.MonkeyPatch, epoch: int, **options: Any
) -> Distillation:
    """Run ``rbm.distill`` with a checkpoint every epoch, kill it before ``epoch`` is noted, and resume it there."""
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", -1.0)
    append = RunFolder.append_metrics

    def dies(run: RunFolder, record: dict[str, Any]) -> None:
        if (record["phase"], record["epoch"]) == ("rbm", epoch):
            raise KeyboardInterrupt
        append(run, record)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append_metrics", dies)
        with pytest.raises(KeyboardInterrupt):
            rbm.distill(data, folder=folder, **options)
    return rbm.distill(data, folder=folder, resume=True, **options)
