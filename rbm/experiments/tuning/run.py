"""The search: Optuna proposes the settings of each trial from the results of earlier trials."""

from concurrent.futures import FIRST_COMPLETED, Executor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from rbm.config import Config
from rbm.experiments.runner import remembered_dataset
from rbm.experiments.tuning.folder import FAILED, claimed, finished, open_study, summary, write
from rbm.experiments.tuning.search import Search, Tuned
from rbm.experiments.tuning.session import Session
from rbm.experiments.tuning.space import default_space
from rbm.teachers import check_teacher
from rbm.teachers.neighbor_sampling import check_sampling
from rbm.utils.arguments import check_sizes, usable_device
from rbm.utils.cluster import check_ray
from rbm.utils.files import as_path
from rbm.utils.parallel import worker_pool
from rbm.utils.progress import count_runs
from rbm.utils.studies import import_optuna

if TYPE_CHECKING:
    from optuna.trial import Trial


def tune(
    config: Config,
    out: Path | str,
    *,
    method: str = "rbm",
    seeds: tuple[int, ...] = (0, 1),
    space: dict[str, Any] | None = None,
    trials: int = 20,
    jobs: int = 1,
    ray: bool = False,
    cache: Path | str | None = None,
    device: str = "cpu",
    console: Console | Literal["auto"] | None = None,
) -> Tuned:
    """Search for the settings with which a method's student is most accurate on validation nodes.

    The first trial is the starting point, so the best trial is never worse than it. A trial is stopped early if its
    mean over the seeds so far is below the median of earlier trials at that point (not with Ray). Calling the function
    again with the same folder continues a killed search, or extends it if ``trials`` is larger. With one job, the same
    seed gives the same trials, whether or not the search was killed.

    Args:
        config: the starting point; its dataset is loaded by name or path. The test set is removed (``evaluate_on:
            validation``), and the configuration's seed is the seed of the search.
        out: folder of the search, see :mod:`rbm.experiments.tuning.folder`.
        method: a name in ``rbm.distillation.registry.METHODS``.
        seeds: seeds of each trial's runs. Each seed draws another half of the validation nodes for evaluation, and
            another split if splits depend on the seed. More seeds mean less noise.
        space: setting -> choices or range, see :mod:`rbm.experiments.tuning.space`; by default that of the method.
        trials: the total number of trials in the folder, including the first.
        jobs: number of parallel trials, each in its own process.
        ray: run the trials with Ray Tune, on the cluster of ``RAY_ADDRESS`` or on this machine. All machines of the
            cluster must be able to read ``cache`` and the dataset's folder.
        cache: folder of cached teachers and encodings, shared by the trials.
        device: device on which models are trained.
        console: where progress is shown; ``"auto"`` as in :func:`rbm.distill`.

    Raises:
        TypeError: ``config``, ``seeds``, ``trials`` or ``jobs`` has the wrong type.
        ValueError: invalid settings, space, numbers or device, or a package that is not installed (raised before any
            work); or the folder contains another search.
        FileExistsError: the folder contains something else.
        BlockingIOError: another process is searching there.
    """
    if not isinstance(config, Config):
        raise TypeError(f"config is a {type(config).__name__}, expected an rbm.Config")
    check_sizes(trials=trials, jobs=jobs)
    device = usable_device(device)
    if isinstance(seeds, int):
        raise TypeError(f"seeds is {seeds}, expected several numbers; use seeds=({seeds},)")
    search = Search(config, method, tuple(seeds), default_space(method) if space is None else space)
    if config.teacher.name != "logits":
        check_teacher(config.teacher.name)
        check_sampling(config)
    remembered_dataset.cache_clear()  # a file may have changed since an earlier call
    search.data(search.seeds[0], device)  # report a missing graph before the folder is made
    run = run_here
    if ray:
        from rbm.experiments.tuning import ray as cluster

        check_ray("tune")
        run = cluster.run_on_ray
    folder, shared = as_path("out", out), None if cache is None else as_path("cache", cache)
    with (
        claimed(folder, search),
        open_study(folder, search) as (study, storage),
        count_runs(console, "trials", trials) as bar,
    ):

        def note() -> None:
            done = finished(study)
            found = summary(search, done)
            what = "" if found is None else f"start {found.start_accuracy:.2%}  best {found.accuracy:.2%}"
            bar.update(len(done), what)
            if found is not None:
                write(folder, search, found)

        note()
        if len(finished(study)) < trials:
            run(Session(search, folder, study, storage, trials, jobs, shared, device, note))
        return summary(search, finished(study))


def run_here(session: Session) -> None:
    """Run trials in processes of this machine; the first runs alone and fills the cache of teachers and encodings."""
    search, study, jobs = session.search, session.study, session.jobs
    space, waiting = search.space(), {}

    def submit(pool: Executor, trial: "Trial", before: list[float]) -> None:
        seed = search.seeds[len(before)]
        future = pool.submit(search.attempt, trial.params, seed, session.cache, session.device)
        waiting[future] = (trial, before)

    def judge(pool: Executor, trial: "Trial", accuracies: list[float]) -> None:
        mean = sum(accuracies) / len(accuracies)
        trial.report(mean, len(accuracies))
        if len(accuracies) == len(search.seeds):
            study.tell(trial, mean)
        elif trial.should_prune():
            study.tell(trial, state=import_optuna().trial.TrialState.PRUNED)
        else:
            submit(pool, trial, accuracies)
            return
        session.note()

    with worker_pool(jobs) as pool:
        while waiting or len(finished(study)) < session.trials:
            done = len(finished(study))
            while len(waiting) < (jobs if done else 1) and done + len(waiting) < session.trials:
                study.sampler = session.sampler()
                submit(pool, study.ask(space), [])
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                trial, before = waiting.pop(future)
                accuracy, reason = future.result()
                if reason:
                    trial.set_user_attr(FAILED, reason)
                judge(pool, trial, [*before, accuracy])
