"""A search in progress: the input of the functions that run its trials."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rbm.experiments.tuning.folder import finished
from rbm.experiments.tuning.search import Search
from rbm.utils.studies import import_optuna

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage


@dataclass(frozen=True)
class Session:
    """Arguments of :func:`~rbm.experiments.tuning.run.tune`, its folder, Optuna's study and storage, and a callback
    ``note``.
    """

    search: Search
    folder: Path
    study: "Study"
    storage: "BaseStorage"
    trials: int
    jobs: int
    cache: Path | None
    device: str
    note: Callable[[], None]

    def sampler(self) -> "BaseSampler":
        """A sampler that depends only on the number of trials so far, not on whether the search was resumed."""
        optuna = import_optuna()
        running = self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
        seed = 1_000_003 * self.search.start.seed + len(finished(self.study)) + len(running)
        return optuna.samplers.TPESampler(seed=seed, constant_liar=self.jobs > 1)
