"""The verdict of a run (:mod:`rbm.distillation.verdict`) in sentences, for terminal, report and ``results.md``."""

import math
from typing import Any

from rbm.config import as_text
from rbm.datasets.homophily import HETEROPHILOUS, Homophily
from rbm.distillation.auto.space import GIVEN
from rbm.distillation.registry import METHODS, title_of
from rbm.distillation.verdict import CONFIDENCE, LABELS_ALONE, Comparison

_HOMOPHILOUS = 0.5
_FEW = 3  # up to this number of other students, each is compared in full
_FAR = 0.05  # lead of the teacher in accuracy above which another method is suggested
_ALONE = "; students do not learn the soft labels of neighbours (distill.neighbors)"


def verdict_sentences(verdict: dict[str, Any]) -> list[str]:
    """One sentence each on the search (if there was one), the graph, the teacher, the best student, the kept student
    and the rows that the students take.
    """
    alone = _ALONE if _reads_distill(verdict) and not verdict.get("neighbors", True) else ""
    graph = f"{_graph(verdict['homophily'])}{alone}."
    return [
        *([search_sentence(verdict["search"])] if "search" in verdict else []),
        graph if _has_edges(verdict) else "Graph: no edge joins two nodes, so the features are all that there is.",
        *([] if verdict["teacher_gain"] is None else [_teacher(verdict)]),
        _best(verdict),
        _kept(verdict),
        _needs(verdict["needs"], _has_edges(verdict), searched="search" in verdict),
    ]


def _has_edges(verdict: dict[str, Any]) -> bool:
    return verdict.get("has_edges", True)  # absent in verdicts of earlier versions


def _reads_distill(verdict: dict[str, Any]) -> bool:
    """Whether the settings of the section ``distill`` mean something to a method of the run."""
    return any("distill" in METHODS[name].sections for name in verdict["cost"] if name in METHODS)


def search_sentence(found: dict[str, Any]) -> str:
    """One sentence on the outcome of a search, from :func:`rbm.distillation.auto.run.outcome_of`."""
    budget, trials = _time(found["budget"]), found["trials"]
    if found["choice"] is None and found.get("needed"):
        return (
            f"Search: the budget of {budget} is too small for this graph: the trainings of the starting points and of"
            f" the run need at least {_time(_rounded(found['needed']))}, judging by the epochs so far; the run uses"
            " the settings that the search started from."
        )
    if found["choice"] is None:
        return (
            f"Search: the budget of {budget} ended before the first trial was complete; the run uses the settings that"
            " the search started from."
        )
    base = "the settings that it started from" if found["choice"]["start"] == GIVEN else "the defaults"
    changed = [f"{name} {as_text(value)}" for name, value in found["changed"].items()]
    changes = f" but {', '.join(changed)}" if changed else ""
    halves = "one half of them" if found["halves"] == 1 else f"mean over {found['halves']} different halves"
    before = "" if found["given_accuracy"] is None else f", and {found['given_accuracy']:.2%} before the search"
    return (
        f"Search: {trials} {'trials' if trials > 1 else 'trial'} within {budget}, {found['given_up']} stopped early;"
        f" chosen: {title_of(found['choice']['method'])} with {base}{changes}; {found['accuracy']:.2%} on held-out"
        f" validation nodes ({halves}){before}{_ahead(found)}."
    )


def _ahead(found: dict[str, Any]) -> str:
    """How far the best trial is ahead of the given settings, and how far it is expected to be on new nodes."""
    gain, corrected = found.get("gain"), found.get("corrected")
    if not gain or corrected is None:  # searches of earlier versions have no corrected gain
        return ""
    best = "it is" if corrected > 0 else f"the best of {found['tried']} others was"
    lead = f"; {best} ahead by {100 * gain:.2f} points there, and by {100 * corrected:.2f} after correction for chance"
    return lead if corrected > 0 else f"{lead}, so the settings stay"


def _time(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} min"


def _rounded(seconds: float) -> float:
    """Seconds or, from two minutes on, minutes, rounded up."""
    unit = 1 if seconds < 119 else 60
    return math.ceil(seconds / unit) * unit


def _graph(found: dict[str, Any] | None) -> str:
    if found is None:
        return "Graph: no edge connects two training or validation nodes, so its homophily is unknown"
    kind = "heterophilous, most edges connect different classes"
    if found["share"] >= HETEROPHILOUS:
        kind = "homophilous" if found["share"] >= _HOMOPHILOUS else "weakly homophilous"
        if not Homophily(**found).follows_classes:
            kind = "edges follow classes little more than by chance"
    return (
        f"Graph: {kind}; {found['share']:.0%} of the {found['edges']:,} edges between training and validation nodes"
        f" connect nodes of the same class ({found['chance']:.0%} expected by chance)"
    )


def _teacher(verdict: dict[str, Any]) -> str:
    gain, accuracy = Comparison(**verdict["teacher_gain"]), verdict["accuracy"]
    both = (
        f"Teacher: {accuracy['teacher']:.2%} at validation, compared with {accuracy[LABELS_ALONE]:.2%} for an MLP"
        f" trained on the labels alone ({100 * gain.difference:+.2f} points, {_interval(gain)})"
    )
    if verdict.get("source") == LABELS_ALONE:
        return f"{both}; its soft labels are misleading, so students learn those of the MLP instead (distill.source)."
    if not _has_edges(verdict):
        return f"{both}; without edges, it is an MLP of another shape."
    of_mlp = verdict.get("teacher") == "mlp"
    if of_mlp and (gain.difference > 0 or gain.is_chance):
        return f"{both}; it uses no edges, so this says nothing about the graph."
    if gain.difference > 0 and not gain.is_chance:
        return f"{both}; the graph helps."
    cause = "this may be chance, and the graph may not help" if gain.is_chance else "its soft labels mislead students"
    other = "another --teacher" if of_mlp else "--teacher mlp or another"
    if not _reads_distill(verdict):
        return f"{both}; {cause}; try {other}."
    settings = ", or distill.label_weight=0.8"
    if verdict.get("neighbors", True):
        settings = ", distill.label_weight=0.8 or distill.neighbors=false"
    return f"{both}; {cause}; try {other}{settings}."


def _best(verdict: dict[str, Any]) -> str:
    best, cost = verdict["best"], verdict["cost"]
    first = (
        f"Best student: {title_of(best)}, {verdict['accuracy'][best]:.2%} at validation, uses {cost[best]:,} parameters"
    )
    others = {name: Comparison(**fields) for name, fields in verdict["behind"].items() if name != LABELS_ALONE}
    if len(others) > _FEW:
        gaps = ", ".join(f"{title_of(name)} {100 * found.difference:.2f}" for name, found in others.items())
        significant = [title_of(name) for name, found in others.items() if not found.is_chance]
        comparisons = [
            f"points behind: {gaps}",
            f"more than chance for {listed(significant)}" if significant else "all may be chance",
        ]
    else:
        comparisons = [_behind(name, found, cost[name]) for name, found in others.items()]
    return f"{'; '.join([first, *comparisons, *_lead(verdict)])}."


def _behind(name: str, found: Comparison, cost: int) -> str:
    chance = "may be chance" if found.is_chance else "more than chance"
    place = f"{100 * found.difference:.2f} points behind" if found.difference else "equally accurate"
    return f"{title_of(name)} uses {cost:,} and is {place} ({_interval(found)}; {chance})"


def _lead(verdict: dict[str, Any]) -> list[str]:
    """How far the teacher is ahead of the best student, if this is more than chance."""
    if (lead := verdict.get("teacher_lead")) is None:  # verdicts of earlier versions
        return []
    found = Comparison(**lead)
    if found.is_chance or found.difference <= 0:
        return []
    sentence = f"the teacher is {100 * found.difference:.2f} points ahead of the best student ({_interval(found)})"
    # What the run did already is no advice.
    sign = [] if "sign" in verdict["cost"] else ["--method sign, whose rows include features of neighbours"]
    advice = ", or ".join([*sign, *([] if "search" in verdict else ["--auto"])])
    return [f"{sentence}; try {advice}" if advice and found.difference > _FAR and _has_edges(verdict) else sentence]


def _kept(verdict: dict[str, Any]) -> str:
    kept, best = verdict["kept"], verdict["best"]
    alone = verdict["accuracy"].get(LABELS_ALONE, 0.0)  # none with labels_alone=False
    ahead = kept != LABELS_ALONE and alone > verdict["accuracy"][best]
    reason = "the best student at validation" if ahead else "the best at validation"
    if verdict["asked_for"]:
        reason = "as requested"
    elif kept == verdict.get("searched_for") and kept != best:
        reason = "whose settings the search chose, behind the best by no more than chance"
    elif kept == LABELS_ALONE and kept != best:
        reason = f"{verdict['accuracy'][kept]:.2%} at validation, more than half a point ahead of every student"
    elif kept != best:
        reason = "cheaper, and behind the best by no more than chance and at most half a point"
    if ahead:
        reason += f", but {title_of(LABELS_ALONE)} is better than every student, {alone:.2%}"
    others = [name for name in verdict["cost"] if name != kept]
    choice = f"; --keep {' or '.join(others)} keeps another" if others else ""
    return f"Kept: {title_of(kept)}, {reason}{choice}."


def _needs(needs: dict[str, dict[str, Any]], has_edges: bool, *, searched: bool) -> str:
    alone = [title_of(name) for name, need in needs.items() if not need["encodings"]]
    parts = [f"{listed(alone)}: features alone"] if alone else []
    encoded = {name: (need["encodings"], need.get("beside")) for name, need in needs.items() if need["encodings"]}
    for width, beside in dict.fromkeys(encoded.values()):
        names = [title_of(name) for name, need in encoded.items() if need == (width, beside)]
        if not has_edges:
            parts.append(f"{listed(names)}: features and {width} further columns, which say nothing without edges")
            continue
        columns = "encodings of the node's place in the graph (for a new node, from those of its neighbours)"
        if beside is not None:
            columns = f"{beside} (for a new node, one mean of what is stored for its neighbours)"
        parts.append(f"{listed(names)}: features and {width} {columns}")
    if encoded and not has_edges:
        parts.append("--features-only trains without them")
    elif encoded:
        may_choose = not searched and any(beside is None for _, beside in encoded.values())
        choice = "--features-only trains without them, which may be better or worse"
        parts.append(f"{choice}, and --auto chooses by validation" if may_choose else choice)
    return f"Rows to predict: {'; '.join(parts)}."


def _interval(compared: Comparison) -> str:
    ends = f"{100 * compared.low:+.1f} to {100 * compared.high:+.1f}"
    return f"{CONFIDENCE:.0%} interval {ends} on the same {compared.nodes:,} nodes"


def listed(names: list[str]) -> str:
    """Join names for a sentence: ``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
