"""The search loop: points are judged on halves of the validation nodes; Optuna proposes points and stops bad ones.

Each trial judges one point. The resource that successive halving assigns is the number of halves of the validation
nodes. Each half needs its own training, in which the other half selects the epoch. The better half of the trials that
were judged on one half is judged on two, and the better half of those on four.

The time of a trial is stored with it, and the time spent is their sum, so a killed search resumes with the rest of its
budget. A proposal depends only on the earlier trials and the seed.

The budget includes the run after the search. Its time is estimated from the trials. A training that would leave too
little is stopped as soon as its first epochs show this (:mod:`rbm.training.time_limit`).
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
    repeated_seconds,
    seconds_of,
    seconds_of_halves,
)
from rbm.training.time_limit import OutOfTimeError, time_limit
from rbm.utils.studies import import_optuna

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

MOST_HALVES = 4
# Share of the budget that the starting points may take, estimated from their first halves.
_FOR_STARTS = 0.6
# Share of the budget that any other training may take at least, see :meth:`Search._training_limit`.
_FOR_ONE = 1 / 8
# After this many repeated proposals in a row, the search ends: there is hardly anything left to try.
_MOST_REPEATED = 20
_clock = time.perf_counter


class Search:
    """The loop that proposes and judges points until the budget is spent.

    Args:
        space: search space.
        judge: trains a point on one half, ``judge(point, half) -> answers``: one character per validation node, ``1``
            correct, ``0`` wrong, ``-`` not held out; empty if the point cannot be trained.
        study: Optuna's study, empty or of the same search.
        budget: seconds for the whole search and the run after it.
        seed: seed of the proposals.
        note: called with the search and the number of the trial after each training.
        run: methods that the run trains; by default those of the space.
        reserve: seconds of the budget for the end of the run, after its trainings.

    Attributes:
        needed: seconds that the starting points and the run need at least, if the search ended because the budget is
            smaller; None otherwise.
        stopped: seconds of the training that was stopped at the end of the budget.
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
        run: tuple[str, ...] | None = None,
        reserve: float = 0.0,
    ) -> None:
        self.space, self.judge, self.study = space, judge, study
        self.budget, self.seed, self.note = budget, seed, note
        self._methods, self._reserve = space.methods if run is None else run, reserve
        self.needed: float | None = None
        self.stopped = self._since = 0.0
        self._halves: int | None = study.user_attrs.get("halves")
        self._known: list[FrozenTrial] | None = None
        self.starts = space.starts()
        self.first = [*self.starts, *space.openings()]

    def run(self) -> None:
        """Judge points until the budget is spent or no new points are proposed."""
        self._judge_points()
        self._count_fewer_halves()

    def _judge_points(self) -> None:
        repeats, self._since = 0, _clock()
        while repeats < _MOST_REPEATED:
            trial = self._next()
            point = self._draw(trial)
            if not self._fits_budget(point):
                self._note_needed(point, 0.0)
                return
            try:
                repeats = 0 if self._train(trial, point) else repeats + 1
            except OutOfTimeError as error:
                self.stopped = self._lap()
                self._note_needed(point, error.needed)
                return
            self._settle(trial)
            self.note(self, trial.number)

    def _count_fewer_halves(self) -> None:
        """If the budget ended before all starting points were complete, count as many halves as all of them have."""
        started = self._started_trials()
        starts = started[: len(self.starts)]
        if len(starts) < len(self.starts) or all(trial.state.name == "COMPLETE" for trial in starts):
            return
        if judged := min(len(accuracies(trial)) for trial in starts):
            self._halves = judged
            self.study.set_user_attr("halves", judged)
            for trial in started:
                if trial.state.name == "RUNNING" and self._settle(self._resumed(trial)):
                    self.note(self, trial.number)

    def trials(self) -> list["FrozenTrial"]:
        """All trials, including unfinished ones."""
        if self._known is None:  # reading them takes longer than everything else here
            self._known = self.study.get_trials(deepcopy=False)
        return self._known

    def spent(self) -> float:
        """Seconds of all trainings so far."""
        return sum(map(seconds_of, self.trials()))

    @property
    def halves(self) -> int:
        """Number of halves of a complete trial; 1 until the times of the starting points are known."""
        return self._halves or 1

    def complete(self) -> list["FrozenTrial"]:
        """Trials that were judged on all halves, in order."""
        return [trial for trial in self.trials() if trial.state.name == "COMPLETE"]

    def best(self, points: list[Point] | None = None) -> "FrozenTrial | None":
        """The complete trial with the highest accuracy (of ``points``, if given), the earliest of equals; or None."""
        candidates = [trial for trial in self.complete() if points is None or point_of(trial) in points]
        return max(candidates, key=lambda trial: (self.accuracy(trial), -trial.number), default=None)

    def accuracy(self, trial: "FrozenTrial | Trial") -> float:
        """Mean accuracy of a trial over its halves so far, of which at most :attr:`halves` count."""
        known = self.accuracies(trial)
        return sum(known) / len(known)

    def accuracies(self, trial: "FrozenTrial | Trial") -> list[float]:
        """Accuracy of a trial on each half so far that counts."""
        return accuracies(trial)[: self._halves]

    def given(self) -> "FrozenTrial | None":
        """The best complete trial of the given configuration; or None."""
        return self.best(self._given_points())

    def lead(self, trial: "FrozenTrial | None") -> Lead | None:
        """Lead of a complete trial over the given configuration; None if either is not complete."""
        given = self.given()
        if trial is None or given is None or trial.state.name != "COMPLETE":
            return None
        return lead(self._answers(trial), self._answers(given))

    def corrected_gain(self) -> float | None:
        """The expected gain of the best trial over the given configuration
        (:func:`rbm.distillation.auto.trials.corrected_gain`); None if no trial of that configuration is complete.
        """
        complete, points = self.complete(), self._given_points()
        given = [index for index, trial in enumerate(complete) if point_of(trial) in points]
        return corrected_gain([self._answers(trial) for trial in complete], given) if given else None

    def _answers(self, trial: "FrozenTrial") -> list[str]:
        return answers(trial)[: self._halves]

    def choice(self, gain: float | None = None) -> "FrozenTrial | None":
        """The best trial if its expected gain over the given configuration is positive, otherwise the best trial of
        that configuration; None if no trial is complete.

        The highest accuracy of many trials is partly due to chance, so the corrected gain decides. ``gain`` is
        :meth:`corrected_gain`, if it is known already.
        """
        gain = self.corrected_gain() if gain is None else gain
        return self.best() if gain is None or gain > 0 else self.given()

    @property
    def tried(self) -> int:
        """Number of points that were judged, without the given configuration."""
        points = [point_of(trial) for trial in self.trials() if answers(trial)]
        return len({tuple(point.items()) for point in points if point not in self._given_points()})

    def _given_points(self) -> list[Point]:
        return [point for point in self.starts if point["start"] == GIVEN]

    def _next(self) -> "Trial":
        """The trial to judge on one more half: first all starts on one half, then unfinished trials, then a new one."""
        started = self._started_trials()
        if len(started) < len(self.starts):
            return self._resumed(started[-1]) if started and not accuracies(started[-1]) else self._ask()
        if self._halves is None and all(map(accuracies, started)):
            self._halves = self._affordable_halves()
            self.study.set_user_attr("halves", self._halves)
        running = [trial for trial in started if trial.state.name == "RUNNING"]
        waiting = [trial for trial in running if not self._settle(self._resumed(trial))]
        return self._resumed(min(waiting, key=lambda trial: len(accuracies(trial)))) if waiting else self._ask()

    def _started_trials(self) -> list["FrozenTrial"]:
        return [trial for trial in self.trials() if trial.state.name != "WAITING"]

    def _resumed(self, trial: "FrozenTrial") -> "Trial":
        return import_optuna().trial.Trial(self.study, trial._trial_id)

    def _ask(self) -> "Trial":
        number = len(self._started_trials())
        if number == len(self.trials()) and number < len(self.first):
            self.study.enqueue_trial(self.first[number])
        self._known = None
        return self.study.ask()

    def _draw(self, trial: "Trial") -> Point:
        if known := point_of(trial):
            return known

        make = random_sampler if self._is_repeated(trial.number - 1) else sampler

        def choose(name: str, choices: tuple[Any, ...]) -> Any:
            # Seeded for each value, so that a trial that was interrupted while it was drawn gets the same point.
            seed = (1_000_003 * self.seed + 1_009 * trial.number + len(trial.params)) % 2**32
            self.study.sampler = make(seed)
            return trial.suggest_categorical(name, choices)

        point = self.space.draw(choose)
        trial.set_user_attr("point", point)
        self._known = None
        return point

    def _is_repeated(self, number: int) -> bool:
        """Whether a trial repeats an earlier point. With few choices, TPE soon proposes only the best point."""
        before = [point_of(trial) for trial in self.trials()[: number + 1]]
        return bool(before) and before[-1] in before[:-1]

    def _settle(self, trial: "Trial") -> bool:
        """Report a trial's mean so far. Returns whether the trial has ended: it has all halves, or it is pruned."""
        known = self.accuracies(trial)
        if not known:
            return False
        accuracy = self.accuracy(trial)
        if len(known) not in self.trials()[trial.number].intermediate_values:
            trial.report(accuracy, len(known))
            self._known = None
        if self._halves is None:
            return False
        if len(known) >= self._halves:
            self.study.tell(trial, accuracy)
        elif trial.should_prune() and point_of(trial) not in self.starts:
            self.study.tell(trial, state=import_optuna().trial.TrialState.PRUNED)
        else:
            return False
        self._known = None
        return True

    def _train(self, trial: "Trial", point: Point) -> float:
        """Judge a trial on its next half and return the seconds that this took, with those of its proposal."""
        half = len(accuracies(trial))
        found = self._judged_before(trial, point, half)
        if found is None:
            left = limit = self._left()
            # The time of this method in the run is not known yet, and it will be about the same.
            repeated = point["method"] not in self._usual()
            if point not in self.starts:
                limit = min(left, self._training_limit())
            reused = 0.0
            try:
                with time_limit(limit, repeated=repeated) as given:
                    right = self.judge(point, half)
                    reused = given.reused
            except OutOfTimeError:
                if limit == left:
                    raise
                right = ""  # too slow for this budget
            found = [right, self._lap(), reused]
        trial.set_user_attr(f"half {half}", found)
        self._known = None
        return found[1]

    def _note_needed(self, point: Point, further: float) -> None:
        """Note a budget that is too small for the starting points; the training of one takes ``further`` seconds."""
        if point in self.starts and self._halves is None:
            self.needed = self.budget - self._left() + further

    def _lap(self) -> float:
        """Seconds since the last call, or since the search began or was resumed."""
        last, self._since = self._since, _clock()
        return self._since - last

    def _judged_before(self, trial: "Trial", point: Point, half: int) -> list[Any] | None:
        """What :meth:`_train` stores if an earlier trial of the same point was judged on this half, otherwise None."""
        for other in self.trials()[: trial.number]:
            if point_of(other) == point and f"half {half}" in other.user_attrs:
                return [answers(other)[half], 0.0, 0.0]
        return None

    def _affordable_halves(self) -> int:
        most = min(_FOR_STARTS * self.budget, self.budget - self._of_run() - self._reserve)
        number = 1
        while number < MOST_HALVES and 2 * number * self.spent() <= most:
            number *= 2
        return number

    def _fits_budget(self, point: Point) -> bool:
        """Whether a training of the point is likely to fit into the rest of the budget. Starting points are always
        tried while there is a rest, because without them nothing can be chosen.
        """
        left = self._left()
        return left > 0 if point in self.starts else self._usual()[point["method"]] <= left

    def _left(self) -> float:
        """Seconds left for the search, without those of the run after it."""
        return self.budget - self.spent() - self._of_run() - self._reserve

    def _training_limit(self) -> float:
        """Limit in seconds for a training that is not of a start, so that one slow teacher cannot use up the budget."""
        starts = [trial for trial in self.trials() if point_of(trial) in self.starts]
        return max(_FOR_ONE * self.budget, 2 * max(taken for trial in starts for taken in seconds_of_halves(trial)))

    def _of_run(self) -> float:
        """Estimated seconds of the trainings of the run: the usual time of each of its methods, and what the best or
        the given trial took beyond that, mainly for its teacher. Methods that were not trained yet count as nothing if
        a trial will train them, otherwise as the median of the others.
        """
        usual = self._usual()
        if not usual:
            return 0.0
        unknown = statistics.median(usual.values())
        students = [usual.get(method, 0.0 if method in self.space.methods else unknown) for method in self._methods]
        likely = [trial for trial in (self.best(), self.given()) if trial is not None] or self.trials()
        teachers = {(point["start"], point["teacher"]) for point in map(point_of, likely) if point}
        further = [0.0]
        for trial in self.trials():
            point = point_of(trial)
            if point and (point["start"], point["teacher"]) in teachers:
                further += [taken - usual[point["method"]] for taken in repeated_seconds(trial)]
        return sum(students) + max(further)

    def _usual(self) -> dict[str, float]:
        """Method -> median seconds of its trainings, without what the run after the search reuses."""
        by_method: dict[str, list[float]] = {}
        for trial in self.trials():
            by_method.setdefault(point_of(trial).get("method", ""), []).extend(repeated_seconds(trial))
        return {method: statistics.median(times) for method, times in by_method.items() if times}


def sampler(seed: int | None = None) -> "BaseSampler":
    """TPE that proposes values one by one from finished trials only, whatever the defaults of Optuna's version are."""
    return import_optuna().samplers.TPESampler(seed=seed, multivariate=False, constant_liar=False)


def random_sampler(seed: int) -> "BaseSampler":
    """A sampler that draws values at random."""
    return import_optuna().samplers.RandomSampler(seed=seed)


def rows(search: Search) -> list[dict[str, Any]]:
    """One dictionary per trial, as in ``auto.csv``; ``gain`` and ``error`` are the lead of a complete trial."""
    settings = dict.fromkeys(name for known in search.space.settings.values() for name in known)
    columns = ("start", "method", "teacher", "encoding", *settings)
    found = []
    for trial in search.trials():
        point, known = point_of(trial), search.accuracies(trial)
        if not known:
            continue
        ahead = search.lead(trial)
        found.append(
            {
                "trial": trial.number,
                "state": {"COMPLETE": "complete", "PRUNED": "given up"}.get(trial.state.name, "unfinished"),
                "accuracy": f"{search.accuracy(trial):.5f}",
                **{name: point.get(name, "") for name in columns},
                **{f"half {half}": f"{known[half]:.5f}" if half < len(known) else "" for half in range(search.halves)},
                "gain": "" if ahead is None else f"{ahead.gain:.5f}",
                "error": "" if ahead is None else f"{ahead.error:.5f}",
                "seconds": f"{seconds_of(trial):.1f}",
            }
        )
    return found
