"""The search loop: points are judged on halves of the validation nodes; Optuna proposes points and stops bad ones.

A trial is a point. Its resource, of which successive halving gives more to what does well, is the number of halves that
it is judged on: each is a training of its own, in which the other half of the validation nodes chooses the epoch. Of
the trials that were judged on one half the better half goes on to two, of those the better half to four.

The time that a trial took is kept with it, and time that was spent is the sum of these: a search that was killed goes
on with what was left of its budget. A proposal depends on the trials before it and on the seed alone.
"""

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rbm.distillation.auto.space import GIVEN, Point, Space
from rbm.distillation.auto.trials import (
    Lead,
    accuracies,
    answers,
    corrected_gain,
    lead,
    point_of,
    seconds_of,
    seconds_of_halves,
)
from rbm.training.loop import OutOfTimeError, time_limit
from rbm.utils.studies import import_optuna

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

MOST_HALVES = 4
# The share of the budget that the starting points may take, estimated from their first halves.
_FOR_STARTS = 0.6
# The share of the budget that any training may take if it is not much slower than theirs.
_FOR_ONE = 1 / 8
# After so many repeated proposals in a row there is hardly anything left to try.
_MOST_REPEATED = 20
_clock = time.perf_counter


class Search:
    """The loop that proposes and judges points until the budget is spent.

    Args:
        space: what may be chosen.
        judge: trains a point on one half, ``judge(point, half) -> answers``: a character for each validation node,
            ``1`` right, ``0`` wrong, ``-`` not held out; empty where it cannot be trained.
        study: Optuna's, empty or of the same search.
        budget: seconds for all of it, and for the training of the choice after it.
        seed: of the proposals.
        note: told of the search and of the trial's number after each training.
    """

    def __init__(
        self,
        space: Space,
        judge: Callable[[Point, int], str],
        study: "Study",
        *,
        budget: float,
        seed: int,
        note: Callable[["Search", int], None],
    ) -> None:
        self.space, self.judge, self.study = space, judge, study
        self.budget, self.seed, self.note = budget, seed, note
        self._halves: int | None = study.user_attrs.get("halves")
        self._known: list[FrozenTrial] | None = None
        self.starts = space.starts()
        self.first = [*self.starts, *space.openings()]

    def run(self) -> None:
        """Judge points until the budget is spent, or nothing new is proposed."""
        in_a_row = 0
        while in_a_row < _MOST_REPEATED:
            trial = self._next()
            point = self._draw(trial)
            if not self._is_time_for(point):
                return
            try:
                in_a_row = 0 if self._train(trial, point) else in_a_row + 1
            except OutOfTimeError:
                return
            self._settle(trial)
            self.note(self, trial.number)

    def trials(self) -> list["FrozenTrial"]:
        """All trials, the unfinished one too."""
        if self._known is None:  # reading them takes longer than everything else here
            self._known = self.study.get_trials(deepcopy=False)
        return self._known

    def spent(self) -> float:
        """Seconds of all trainings so far."""
        return sum(map(seconds_of, self.trials()))

    @property
    def halves(self) -> int:
        """How many a trial is judged on to its end; 1 until the starting points have shown how long that takes."""
        return self._halves or 1

    def complete(self) -> list["FrozenTrial"]:
        """Trials that were judged to their end, in their order."""
        return [trial for trial in self.trials() if trial.state.name == "COMPLETE"]

    def best(self, points: list[Point] | None = None) -> "FrozenTrial | None":
        """The complete trial with the highest accuracy (of ``points`` alone), the earlier one of equals; or None."""
        some = [trial for trial in self.complete() if points is None or point_of(trial) in points]
        return max(some, key=lambda trial: (trial.value, -trial.number), default=None)

    def given(self) -> "FrozenTrial | None":
        """The best complete trial of the given configuration; or None."""
        return self.best(self._given_points())

    def lead(self, trial: "FrozenTrial | None") -> Lead | None:
        """What a complete trial is ahead of the given configuration; None where either is not complete."""
        given = self.given()
        if trial is None or given is None or trial.state.name != "COMPLETE":
            return None
        return lead(answers(trial), answers(given))

    def corrected_gain(self) -> float | None:
        """The expected gain of the best trial over the given configuration (:func:`~.trials.corrected_gain`); None
        where the latter is not complete.
        """
        complete, points = self.complete(), self._given_points()
        given = [index for index, trial in enumerate(complete) if point_of(trial) in points]
        return corrected_gain([answers(trial) for trial in complete], given) if given else None

    def choice(self) -> "FrozenTrial | None":
        """The best trial, if its expected gain over the given configuration is positive, or else the best trial of
        that configuration; None where no trial is complete.

        The trial with the highest accuracy owes a part of it to chance, the more the more trials there are. What is
        left without that part decides.
        """
        gain = self.corrected_gain()
        return self.best() if gain is None or gain > 0 else self.given()

    @property
    def tried(self) -> int:
        """How many points other than the given configuration were judged."""
        points = [point_of(trial) for trial in self.trials() if answers(trial)]
        return len({tuple(point.items()) for point in points if point not in self._given_points()})

    def _given_points(self) -> list[Point]:
        return [point for point in self.starts if point["start"] == GIVEN]

    def _next(self) -> "Trial":
        """The trial to judge on one half more: every start on its first, then what is not judged to its end, then a new
        one.
        """
        begun = self._begun()
        if len(begun) < len(self.starts):
            return self._resumed(begun[-1]) if begun and not accuracies(begun[-1]) else self._ask()
        if self._halves is None and all(map(accuracies, begun)):
            self._halves = self._affordable_halves()
            self.study.set_user_attr("halves", self._halves)
        running = [trial for trial in begun if trial.state.name == "RUNNING"]
        waiting = [trial for trial in running if not self._settle(self._resumed(trial))]
        return self._resumed(min(waiting, key=lambda trial: len(accuracies(trial)))) if waiting else self._ask()

    def _begun(self) -> list["FrozenTrial"]:
        return [trial for trial in self.trials() if trial.state.name != "WAITING"]

    def _resumed(self, trial: "FrozenTrial") -> "Trial":
        return import_optuna().trial.Trial(self.study, trial._trial_id)

    def _ask(self) -> "Trial":
        number = len(self._begun())
        if number == len(self.trials()) and number < len(self.first):
            self.study.enqueue_trial(self.first[number])
        self._known = None
        return self.study.ask()

    def _draw(self, trial: "Trial") -> Point:
        if known := point_of(trial):
            return known

        make = random_sampler if self._is_repeated(trial.number - 1) else sampler

        def choose(name: str, choices: tuple[Any, ...]) -> Any:
            # Seeded anew for each value, so that a trial that was cut short while it was drawn becomes the same one.
            seed = (1_000_003 * self.seed + 1_009 * trial.number + len(trial.params)) % 2**32
            self.study.sampler = make(seed)
            return trial.suggest_categorical(name, choices)

        point = self.space.draw(choose)
        trial.set_user_attr("point", point)
        self._known = None
        return point

    def _is_repeated(self, number: int) -> bool:
        """Whether a trial has the point of one before it. On a few choices TPE soon proposes the best point alone."""
        before = [point_of(trial) for trial in self.trials()[: number + 1]]
        return bool(before) and before[-1] in before[:-1]

    def _settle(self, trial: "Trial") -> bool:
        """Report a trial's mean so far; whether that was its end, because it has all halves or is given up."""
        known = accuracies(trial)
        if not known:
            return False
        mean = sum(known) / len(known)
        if len(known) not in self.trials()[trial.number].intermediate_values:
            trial.report(mean, len(known))
            self._known = None
        if self._halves is None:
            return False
        if len(known) >= self._halves:
            self.study.tell(trial, mean)
        elif trial.should_prune() and point_of(trial) not in self.starts:
            self.study.tell(trial, state=import_optuna().trial.TrialState.PRUNED)
        else:
            return False
        self._known = None
        return True

    def _train(self, trial: "Trial", point: Point) -> float:
        """Judge a trial on its next half; the seconds that this took."""
        half = len(accuracies(trial))
        found = self._judged_before(trial, point, half)
        if found is None:
            left, began = self._left(), _clock()
            limit = left if point in self.starts else min(left, self._longest())
            try:
                with time_limit(limit):
                    right = self.judge(point, half)
            except OutOfTimeError:
                if limit == left:
                    raise
                right = ""  # it is too slow to be what this budget asks for
            found = [right, _clock() - began]
        trial.set_user_attr(f"half {half}", found)
        self._known = None
        return found[1]

    def _judged_before(self, trial: "Trial", point: Point, half: int) -> list[Any] | None:
        """The answers of an earlier trial of the same point, in no time."""
        for other in self.trials()[: trial.number]:
            if point_of(other) == point and f"half {half}" in other.user_attrs:
                return [other.user_attrs[f"half {half}"][0], 0.0]
        return None

    def _affordable_halves(self) -> int:
        number = 1
        while number < MOST_HALVES and 2 * number * self.spent() <= _FOR_STARTS * self.budget:
            number *= 2
        return number

    def _is_time_for(self, point: Point) -> bool:
        """Whether a training of the point, and then those of the run itself, are likely to fit into the budget."""
        return not self.spent() or self._usual(point["method"]) <= self._left()

    def _left(self) -> float:
        """Seconds for the search, when the run itself has had those that its students usually take."""
        spent = self.spent()
        return self.budget - spent - (sum(map(self._usual, self.space.methods)) if spent else 0.0)

    def _longest(self) -> float:
        """Seconds that a training other than the starts' may take: one slow teacher must not have the whole budget."""
        starts = [trial for trial in self.trials() if point_of(trial) in self.starts]
        return max(_FOR_ONE * self.budget, 2 * max(taken for trial in starts for taken in seconds_of_halves(trial)))

    def _usual(self, method: str) -> float:
        """Median seconds of a method's trainings; of all, where it has had none."""
        by_method: dict[str, list[float]] = {}
        for trial in self.trials():
            times = [taken for taken in seconds_of_halves(trial) if taken]
            by_method.setdefault(point_of(trial).get("method", ""), []).extend(times)
        known = by_method.get(method) or [taken for times in by_method.values() for taken in times]
        return statistics.median(known)


def sampler(seed: int | None = None) -> "BaseSampler":
    """Values are proposed one by one, and by finished trials alone, whatever a version of Optuna does by default."""
    return import_optuna().samplers.TPESampler(seed=seed, multivariate=False, constant_liar=False)


def random_sampler(seed: int) -> "BaseSampler":
    """Values are drawn at random."""
    return import_optuna().samplers.RandomSampler(seed=seed)


def rows(search: Search) -> list[dict[str, Any]]:
    """A dictionary a trial, as ``auto.csv`` has it; ``gain`` and ``error`` are those of a complete one's lead."""
    settings = dict.fromkeys(name for known in search.space.settings.values() for name in known)
    columns = ("start", "method", "teacher", "encoding", *settings)
    found = []
    for trial in search.trials():
        point, known = point_of(trial), accuracies(trial)
        if not known:
            continue
        ahead = search.lead(trial)
        found.append(
            {
                "trial": trial.number,
                "state": {"COMPLETE": "complete", "PRUNED": "given up"}.get(trial.state.name, "unfinished"),
                "accuracy": f"{sum(known) / len(known):.5f}",
                **{name: point.get(name, "") for name in columns},
                **{f"half {half}": f"{known[half]:.5f}" if half < len(known) else "" for half in range(search.halves)},
                "gain": "" if ahead is None else f"{ahead.gain:.5f}",
                "error": "" if ahead is None else f"{ahead.error:.5f}",
                "seconds": f"{seconds_of(trial):.1f}",
            }
        )
    return found
