"""The results of one configuration over several seeds, for ``rbm distill --seeds``: a table, and what it says."""

from rbm.distillation.registry import title_of
from rbm.experiments.experiment import Experiment
from rbm.experiments.statistics import p_text
from rbm.experiments.tables import Group, Runs, compare_runs, group_rows, percent, published

_CHANCE = 0.05  # from this p-value on, a difference may be chance
_MEANING = (
    "Accuracies in per cent at the epoch with the best validation accuracy; Test max: maximum over epochs, as the"
    " paper's code reports it. Active: parameters that one prediction uses."
)


def seeds_report(chosen: Experiment, rows: list[dict[str, str]]) -> str:
    """Markdown: a line for each model, with means ± sample standard deviations over seeds, and the best student.

    The best student is that with the highest mean accuracy on validation nodes. Its lead over the others is measured on
    test nodes, with a paired t-test over seeds.

    Args:
        chosen: one graph and one setting.
        rows: rows of the CSV file, possibly of other experiments too.
    """
    (graph,), (setting,), (variant,) = chosen.datasets, chosen.settings, chosen.variants
    group = Group(graph, setting, chosen.protocol, chosen.teacher, chosen.preset, variant)
    groups = group_rows(rows)
    found = {"teacher": groups.get(group._replace(variant=""), {}).get("teacher", {})}
    found |= {method: groups.get(group, {}).get(method, {}) for method in chosen.methods}
    models = {name: {seed: runs[seed] for seed in chosen.seeds if seed in runs} for name, runs in found.items()}
    models = {name: runs for name, runs in models.items() if runs}
    lines = [
        f"{group.graph()}, {setting}, {chosen.teacher} teacher, {_over(len(chosen.seeds))}",
        "",
        "| | Test | Val | Test max | Active |",
        "|---|---:|---:|---:|---:|",
        *(f"| {title_of(name)} | {' | '.join(_cells(runs))} |" for name, runs in models.items()),
        "",
        _MEANING,
    ]
    if students := [name for name in models if name != "teacher"]:
        best = max(students, key=lambda name: percent(models[name], "val").mean)
        lines.append(_best(best, models))
    if "rbm" in models and (paper := published(group)) is not None:
        lines.append(f"The paper reports {paper[0]:.2f} ± {paper[1]:.2f} for RbM, which compares with its Test max.")
    return "".join(f"{line}\n" for line in lines)


def _cells(runs: Runs) -> list[str]:
    active = next(iter(runs.values()))["active_parameters"]
    accuracies = [str(percent(runs, column)) for column in ("test_at_best_val", "val", "test_max")]
    return [*accuracies, f"{int(active):,}" if active.isdigit() else ""]  # earlier versions wrote None


def _best(best: str, models: dict[str, Runs]) -> str:
    sentence = f"Best student at validation: {title_of(best)}."
    others = [_compared(models[best], name, runs) for name, runs in models.items() if name != best]
    if not others:
        return sentence
    sentence = f"{sentence} On test nodes, it is {'; '.join(others)}"
    if len(models[best]) == 1:
        return f"{sentence}. One seed does not show whether a difference is chance; --seeds 0-4 trains more."
    return f"{sentence}. p is that of a paired t-test over seeds."


def _compared(first: Runs, name: str, second: Runs) -> str:
    """How far the first model is ahead of another, and whether this may be chance."""
    test = compare_runs(first, second)
    if test.difference == 0:
        return f"as accurate as {_model(name)}"
    lead = f"{abs(test.difference):.2f} points {'ahead of' if test.difference > 0 else 'behind'} {_model(name)}"
    if test.count == 1 or not (p := p_text(test.p)):  # without spread, the test is not defined
        return lead
    return f"{lead} (p {p if p.startswith('<') else f'= {p}'}, {'may be' if test.p >= _CHANCE else 'more than'} chance)"


def _model(name: str) -> str:
    return "the teacher" if name == "teacher" else title_of(name)


def _over(seeds: int) -> str:
    return "one seed" if seeds == 1 else f"mean ± standard deviation over {seeds} seeds"
