"""The epoch loop of all trained networks: selection by validation accuracy, early stopping, logging, checkpoints."""

import copy
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rbm.config import Network
from rbm.training.run_folder import RunFolder
from rbm.training.selection import Accuracies, EpochLimits, Result, Selection
from rbm.training.time_limit import current_limit
from rbm.utils.distributed import broadcast_from_rank0, world_size
from rbm.utils.precision import autocast, wide
from rbm.utils.progress import Progress
from rbm.utils.timings import part_of_phase
from rbm_kernels._denormals import flushed_denormals

CHECKPOINT_SECONDS = 10.0


class Trainer(ABC):
    """A model with its optimiser. :func:`fit` calls its methods to train an epoch, evaluate, and save its state.

    Attributes:
        model: what is trained.
        precision: ``float32``, or ``bfloat16`` for mixed precision. Trainers run forwards by :meth:`forward`, which
            follows it. It is float32 again after the training.
        follows_precision: False for models without forwards, which are trained alike in every precision.
    """

    model: nn.Module
    precision: str = "float32"
    follows_precision: bool = True

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimiser, built at its first use, when the trainer is complete."""
        return self.build_optimizer()

    @abstractmethod
    def build_optimizer(self) -> torch.optim.Optimizer:
        """An optimiser of everything that is trained."""

    def forward(self, function: Callable, *inputs: Any, **options: Any) -> Any:
        """``function(*inputs, **options)``, such as the model on its rows, in the precision of the training.

        A result, or the first one of several, is float32, so that losses are. Hidden rows of a trace have the dtype of
        the forward.
        """
        if self.precision == "float32":
            return function(*inputs, **options)
        with autocast(self.precision, self._device_type()):
            outputs = function(*inputs, **options)
        return wide(outputs)

    def _device_type(self) -> str:
        tensors = itertools.chain(self.model.parameters(), self.model.buffers())
        return next((tensor.device.type for tensor in tensors), "cpu")

    def train_epoch(self, epoch: int) -> float:
        """Train for one epoch and return its loss: one optimiser step on :meth:`epoch_loss`, unless overridden."""
        self.optimizer.zero_grad()
        loss = self.epoch_loss(epoch)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def epoch_loss(self, epoch: int) -> Tensor:
        """Hook: the loss of an epoch that consists of a single step, a scalar."""
        raise NotImplementedError(f"{type(self).__name__} defines neither train_epoch nor epoch_loss; define one")

    @abstractmethod
    def evaluate(self) -> Accuracies:
        """Accuracies of the present model."""

    def expert_loads(self) -> list[list[float]] | None:
        """Share of the gate mass that each expert of each layer receives; None if the model does not route."""
        return None

    def at_best_epoch(self, epoch: int) -> None:
        """Hook: finish the model after the weights of its best epoch have been loaded."""
        return

    def resume_at(self, epoch: int) -> None:
        """Hook: prepare everything that depends on the epoch number; states are loaded afterwards."""
        return

    def state(self) -> dict[str, Any]:
        """Hook: state to save in addition to model and optimiser."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Hook: load what :meth:`state` returned."""
        return


def fit(
    phase: str,
    trainer: Trainer,
    limits: EpochLimits,
    *,
    folder: RunFolder | None = None,
    progress: Progress,
) -> Result:
    """Train the model of ``trainer``, restore the epoch with the best validation accuracy, and set eval mode.

    After mixed precision, the result has the accuracies of the restored model in float32.

    When ranks train together, all call this function, with trainers that return the same losses and accuracies. Only
    the first rank has the folder; the others continue from its checkpoint.

    Args:
        phase: name of this training in the metrics and in the run folder.
        trainer: see :class:`Trainer`.
        limits: its number of epochs, and which of them may be selected.
        folder: where metrics and checkpoints are written, and from which a checkpoint of this phase is resumed.
        progress: shows losses and accuracies.

    Raises:
        FloatingPointError: the loss is no longer finite.
        OutOfTimeError: the training cannot end within its :func:`rbm.training.time_limit.time_limit`.
    """
    selection, start = Selection(limits), 0
    checkpoint = broadcast_from_rank0(lambda: folder.load_checkpoint() if folder else None)
    if checkpoint is not None and checkpoint["phase"] == phase:
        try:
            start = _restore(checkpoint, trainer, selection)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"the checkpoint does not fit phase {phase!r} ({error!r}); delete checkpoint.pt to start it anew"
            ) from error
    if folder:
        folder.keep_metrics(phase, start)

    saved_at, time_left, fastest = time.monotonic(), current_limit(), float("inf")
    with progress.phase(phase, limits.last + 1) as bar, flushed_denormals():
        for epoch in range(start, limits.last + 1):
            if selection.is_over:  # also in a checkpoint that was saved after the last epoch
                break
            started, began = time.perf_counter(), time_left.passed()
            loss = train_epoch(phase, trainer, epoch)
            with part_of_phase("evaluation"):
                accuracies = trainer.evaluate()
            selection.see(epoch, accuracies, trainer.model)
            seconds, took = time.perf_counter() - started, time_left.passed() - began

            bar.update(epoch + 1, f"loss {loss:.4f}  val {accuracies.val:6.2%}  test {accuracies.test:6.2%}")
            if folder:
                record = _record(phase, epoch, loss, accuracies, seconds)
                if folder.events is not None and (loads := trainer.expert_loads()):
                    record["expert_load"] = loads
                folder.append_metrics(record)
                if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                    folder.save_checkpoint(_snapshot(phase, epoch + 1, trainer, selection))
                    saved_at = time.monotonic()
            fastest = min(fastest, took)
            time_left.check(phase, fastest * selection.least_left)
        result = selection.result
        trainer.model.load_state_dict(selection.state)
        trainer.model.eval()
        trainer.at_best_epoch(result.best_epoch)
        if trainer.precision != "float32":
            trainer.precision = "float32"
            selection.correct(trainer.evaluate())
        bar.finish(
            f"best epoch {result.best_epoch + 1}: val {result.val_accuracy:.2%}  test {result.test_accuracy:.2%}"
        )
    return result


def train_epoch(phase: str, trainer: Trainer, epoch: int) -> float:
    """Train for one epoch, leave the model in eval mode, and return the loss.

    Raises:
        FloatingPointError: the loss is no longer finite.
    """
    trainer.model.train()
    loss = trainer.train_epoch(epoch)
    if not loss < float("inf"):
        remedy = "a smaller learning rate usually helps"
        if epoch == 0:  # the weights are hardly trained yet
            remedy += ", or features of a smaller scale, such as (x - mean) / std"
        raise FloatingPointError(f"the loss of phase {phase!r} became {loss} in epoch {epoch}; {remedy}")
    trainer.model.eval()
    return loss


def fit_phase(
    phase: str,
    trainer: Trainer,
    network: Network,
    folder: RunFolder | None,
    progress: Progress,
    *,
    warmup: int = 0,
    select_warmup: bool = False,
) -> dict[str, Any]:
    """Train with :func:`fit`, or load the phase from the run folder if it is finished; return its result."""
    if (finished := broadcast_from_rank0(lambda: _finished(phase, trainer.model, folder, progress))) is not None:
        result, state = finished
        trainer.model.load_state_dict(state)
        trainer.resume_at(warmup + 1)
        trainer.model.eval()
        trainer.precision = "float32"
        return result
    limits = EpochLimits.of(network, warmup, select_warmup=select_warmup)
    result = asdict(fit(phase, trainer, limits, folder=folder, progress=progress))
    if folder is not None:
        folder.save_phase(phase, trainer.model, result)
    return result


def _finished(
    phase: str, model: nn.Module, folder: RunFolder | None, progress: Progress
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Result and state of a phase that is finished in the run folder, or None."""
    result = None if folder is None else folder.finished(phase)
    if result is None:
        return None
    folder.load_phase(phase, model)
    progress.say(f"{phase}: finished before, taken from {folder.path}")
    return result, model.state_dict()


def build_adam(parameters: Iterable, *, lr: float, weight_decay: float) -> torch.optim.Adam:
    """Fused Adam: one pass over each parameter instead of about ten, which saves seconds with sparse features."""
    return torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay, fused=True)


def _record(phase: str, epoch: int, loss: float, accuracies: Accuracies, seconds: float) -> dict[str, Any]:
    return {
        "phase": phase,
        "epoch": epoch,
        "loss": loss,
        "train_accuracy": accuracies.train,
        "val_accuracy": accuracies.val,
        "test_accuracy": accuracies.test,
        "seconds": round(seconds, 4),
    }


def _snapshot(phase: str, epoch: int, trainer: Trainer, selection: Selection) -> dict[str, Any]:
    return {
        "phase": phase,
        "epoch": epoch,
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "learner": trainer.state(),
        "result": asdict(selection.result),
        "best": selection.state,
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore(checkpoint: dict[str, Any], trainer: Trainer, selection: Selection) -> int:
    trainer.resume_at(checkpoint["epoch"])
    trainer.model.load_state_dict(checkpoint["model"])
    trainer.optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
    trainer.restore(checkpoint["learner"])
    selection.result = Result(**checkpoint["result"])
    selection.state = checkpoint["best"]
    torch.set_rng_state(checkpoint["rng"])
    if checkpoint["cuda_rng"] and world_size() == 1:
        torch.cuda.set_rng_state_all(checkpoint["cuda_rng"])
    elif checkpoint["cuda_rng"]:
        torch.cuda.set_rng_state(checkpoint["cuda_rng"][0])  # all ranks take the state of the first rank's device
    return checkpoint["epoch"]
