"""The verdict of a run in sentences."""

import json

import pytest

from rbm.distillation.sentences import search_sentence, verdict_sentences

FOUND = {
    "homophily": {"share": 0.12, "chance": 0.3, "edges": 1234},
    "nodes": 200,
    "accuracy": {"teacher": 0.6, "labels": 0.8, "mlp": 0.75, "rbm": 0.7},
    "teacher_gain": {"difference": -0.2, "low": -0.3, "high": -0.1, "p": 0.001, "nodes": 200},
    "best": "mlp",
    "behind": {
        "rbm": {"difference": 0.05, "low": 0.01, "high": 0.08, "p": 0.01, "nodes": 200},
        "labels": {"difference": -0.05, "low": -0.08, "high": -0.01, "p": 0.01, "nodes": 200},
    },
    "kept": "mlp",
    "asked_for": False,
    "cost": {"mlp": 1000, "rbm": 5000, "labels": 2000},
    "needs": {"mlp": {"features": 5, "encodings": 0}, "rbm": {"features": 5, "encodings": 0}},
}


def test_words():
    graph, teacher, best, kept, needs = verdict_sentences(FOUND)
    assert graph == (
        "Graph: heterophilous, most edges connect different classes; 12% of the 1,234 edges between training and"
        " validation nodes connect nodes of the same class (30% expected by chance)."
    )
    assert (
        "60.00% at validation, compared with 80.00% for an MLP trained on the labels alone (-20.00 points, 95% interval"
        in teacher
    )
    assert "its soft labels mislead students; try --teacher mlp or another" in teacher
    assert best == (
        "Best student: MLP student, 75.00% at validation, uses 1,000 parameters; RbM student uses 5,000 and is 5.00"
        " points behind (95% interval +1.0 to +8.0 on the same 200 nodes; more than chance)."
    )
    assert kept == (
        "Kept: MLP student, the best student at validation, but MLP on labels is better than every student, 80.00%;"
        " --keep rbm or labels keeps another."
    )
    assert needs == "Rows to predict: MLP student and RbM student: features alone."


def test_words_without_edges():
    """Nothing is said about edges, and nothing is advised that needs some."""
    lead = {"difference": 0.2, "low": 0.1, "high": 0.3, "p": 0.001, "nodes": 200}
    needs = {
        "mlp": {"features": 5, "encodings": 8},
        "rbm": {"features": 5, "encodings": 8},
        "labels": {"features": 5, "encodings": 0},
    }
    found = {**FOUND, "homophily": None, "has_edges": False, "teacher_lead": lead, "needs": needs}
    graph, teacher, best, _, rows = verdict_sentences(found)
    assert graph == "Graph: no edge joins two nodes, so the features are all that there is."
    assert teacher.endswith("; without edges, it is an MLP of another shape.")
    assert "the graph helps" not in verdict_sentences({**found, "teacher_gain": lead})[1]
    assert best.endswith(
        "the teacher is 20.00 points ahead of the best student (95% interval +10.0 to +30.0 on the same 200 nodes)."
    )
    assert rows == (
        "Rows to predict: MLP on labels: features alone; MLP student and RbM student: features and 8 further columns,"
        " which say nothing without edges; --features-only trains without them."
    )


def test_words_for_other_findings():
    gain = {"difference": 0.01, "low": -0.01, "high": 0.03, "p": 0.4, "nodes": 200}
    graph, teacher, *_ = verdict_sentences({**FOUND, "homophily": None, "teacher_gain": gain})
    assert "its homophily is unknown" in graph
    assert "this may be chance, and the graph may not help" in teacher
    for share, words in ((0.3, "weakly homophilous;"), (0.5, "Graph: homophilous;")):
        found = {"share": share, "chance": 0.1, "edges": 10}
        assert words in verdict_sentences({**FOUND, "homophily": found})[0]
    assert "as requested" in verdict_sentences({**FOUND, "asked_for": True})[3]
    kept = verdict_sentences({**FOUND, "kept": "labels"})[3]
    assert kept == (
        "Kept: MLP on labels, 80.00% at validation, more than half a point ahead of every student; --keep mlp or rbm"
        " keeps another."
    )
    assert "cheaper, and behind the best by no more than chance" in verdict_sentences({**FOUND, "kept": "rbm"})[3]
    level = {**FOUND, "accuracy": {**FOUND["accuracy"], "labels": 0.75}}
    assert (
        verdict_sentences(level)[3] == "Kept: MLP student, the best at validation; --keep rbm or labels keeps another."
    )


def test_words_without_the_mlp_on_labels():
    found = {**FOUND, "teacher_gain": None, "accuracy": {"teacher": 0.6, "mlp": 0.75}, "behind": {}, "cost": {"mlp": 9}}
    assert verdict_sentences(found)[2] == "Kept: MLP student, the best at validation."


@pytest.mark.parametrize("changes", [{}, {"teacher_gain": {**FOUND["teacher_gain"], "difference": 0.2, "low": 0.1}}])
def test_a_kept_student_behind_the_mlp_on_labels_is_not_called_the_best(changes):
    """Also if the teacher helps: a single requested method is kept whatever its accuracy is."""
    kept = verdict_sentences({**FOUND, **changes, "cost": {"mlp": 1000, "labels": 2000}, "behind": {}})[3]
    assert kept.startswith("Kept: MLP student, the best student at validation, but MLP on labels is better than every")


def test_edges_that_follow_classes_no_more_than_chance_are_not_called_homophily():
    for share, chance, follows in (
        (0.54, 0.53, False),
        (0.68, 0.56, False),
        (0.35, 0.5, False),
        (0.9, 0.52, True),
        (0.35, 0.1, True),
    ):
        graph = verdict_sentences({**FOUND, "homophily": {"share": share, "chance": chance, "edges": 900}})[0]
        assert ("homophilous" in graph) == follows
        assert ("edges follow classes little more than by chance; " in graph) == (not follows)


def test_a_teacher_far_ahead_of_every_student_is_reported():
    lead = {"difference": 0.26, "low": 0.2, "high": 0.3, "p": 0.0, "nodes": 200}
    best = verdict_sentences({**FOUND, "teacher_lead": lead})[2]
    assert "; the teacher is 26.00 points ahead of the best student (95% interval +20.0 to +30.0 on the same" in best
    assert best.endswith("; try --method sign, whose rows include features of neighbours, or --auto.")
    small = verdict_sentences({**FOUND, "teacher_lead": lead | {"difference": 0.02, "low": 0.01}})[2]
    assert "2.00 points ahead of the best student" in small
    assert "try" not in small
    for none in (lead | {"low": -0.1}, lead | {"difference": -0.26, "low": -0.3, "high": -0.2}):
        assert "teacher" not in verdict_sentences({**FOUND, "teacher_lead": none})[2]
    level = {"rbm": {"difference": 0.0, "low": -0.01, "high": 0.01, "p": 1.0, "nodes": 200}}
    assert "RbM student uses 5,000 and is equally accurate (95%" in verdict_sentences({**FOUND, "behind": level})[2]


def test_nothing_is_advised_that_the_run_did():
    lead = {"difference": 0.26, "low": 0.2, "high": 0.3, "p": 0.0, "nodes": 200}
    needs = {"mlp": {"features": 5, "encodings": 64}}
    found = {**FOUND, "teacher_lead": lead, "needs": needs}
    search = {"budget": 5, "trials": 0, "choice": None}
    assert verdict_sentences(found)[4].endswith(", and --auto chooses by validation.")
    searched = {**found, "search": search}
    assert verdict_sentences(searched)[3].endswith("; try --method sign, whose rows include features of neighbours.")
    assert "--auto" not in "".join(verdict_sentences(searched))
    with_sign = {"cost": {**FOUND["cost"], "sign": 900}}
    assert verdict_sentences({**found, **with_sign})[2].endswith(" on the same 200 nodes); try --auto.")
    assert verdict_sentences({**searched, **with_sign})[3].endswith(" on the same 200 nodes).")
    level = {"difference": 0.01, "low": -0.01, "high": 0.03, "p": 0.4, "nodes": 200}
    for gain in (level, lead):
        teacher = verdict_sentences({**FOUND, "teacher": "mlp", "teacher_gain": gain})[1]
        assert teacher.endswith("); it uses no edges, so this says nothing about the graph.")
    behind = verdict_sentences({**FOUND, "teacher": "mlp"})[1]
    assert "; its soft labels mislead students; try another --teacher, distill.label_weight=0.8 or" in behind


def test_settings_that_no_method_of_the_run_reads_are_not_named():
    """GLNN has a section of its own: distill.label_weight and distill.neighbors change nothing in a run of it."""
    own = {"best": "glnn", "kept": "glnn", "cost": {"glnn": 1000, "labels": 2000}, "behind": {}}
    own["accuracy"] = {"teacher": 0.6, "labels": 0.8, "glnn": 0.75}
    for neighbors in (True, False):
        graph, teacher, *_ = verdict_sentences({**FOUND, **own, "neighbors": neighbors})
        assert graph.endswith("(30% expected by chance).")
        assert teacher.endswith("; its soft labels mislead students; try --teacher mlp or another.")


def test_many_students_are_compared_in_brief():
    gaps = {"glnn": (0.01, -0.01), "krd": (0.0, -0.01), "hgmd": (0.02, -0.01), "rbm": (0.08, 0.05)}
    behind = {
        name: {"difference": gap, "low": low, "high": 0.1, "p": 0.1, "nodes": 200} for name, (gap, low) in gaps.items()
    }
    found = FOUND | {"behind": behind, "cost": FOUND["cost"] | dict.fromkeys(gaps, 5000)}
    best = verdict_sentences(found)[2]
    assert best.endswith(
        "; points behind: GLNN 1.00, KRD 0.00, HGMD 2.00, RbM student 8.00; more than chance for RbM student."
    )
    three = found | {"behind": {name: behind[name] for name in ("glnn", "krd", "hgmd")}}
    assert verdict_sentences(three)[2].count("may be chance") == 3, "up to three are compared in full"
    needs = {"mlp": {"features": 5, "encodings": 64}, "cohop": {"features": 5, "encodings": 4}}
    assert verdict_sentences(found | {"needs": needs})[4].count("--features-only") == 1
    needs["sign"] = {"features": 5, "encodings": 15, "beside": "means of hops 1 to 3"}
    assert verdict_sentences(found | {"needs": needs})[4].endswith("and --auto chooses by validation.")
    assert "--auto" not in verdict_sentences(found | {"needs": {"sign": needs["sign"]}})[4]


def test_a_method_of_ones_own_has_its_name(monkeypatch):
    found = json.loads(json.dumps(FOUND).replace('"rbm"', '"copycat"'))
    assert "copycat uses 5,000" in verdict_sentences(found)[2]


@pytest.mark.parametrize(("needed", "said"), [(0.2, "1 s"), (118.2, "119 s"), (119.5, "2 min"), (121.0, "3 min")])
def test_the_time_that_a_search_needs_is_rounded_up(needed, said):
    found = {"budget": 5, "trials": 0, "choice": None, "needed": needed}
    assert f"need at least {said}, judging" in search_sentence(found)
