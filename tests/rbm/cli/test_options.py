"""Files, options and --set are read as one configuration."""

import pytest

from rbm.cli.options import configuration, lasting_changes


def of(*, dataset=None, teacher=None, preset=None, file=None, assignments=(), **given):
    return configuration(dataset, teacher, preset, given, file, list(assignments))


@pytest.mark.parametrize(
    ("option", "assignment"),
    [
        ({"teacher": "gcn"}, "teacher.name=gcn"),
        ({"setting": "inductive"}, "setting=inductive"),
        ({"preset": "paper"}, "preset=paper"),
        ({"protocol": "cpf"}, "protocol=cpf"),
    ],
)
def test_set_means_the_same_as_the_option(option, assignment):
    by_option = of(dataset="cora", **option)
    assert by_option != of(dataset="cora"), "the presets differ"
    assert of(dataset="cora", assignments=[assignment]) == by_option


def test_set_may_name_the_dataset():
    assert of(assignments=["dataset=photo"]) == of(dataset="amazon-photo")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("teacher=5", "teacher is 5, expected a section"),
        ("teacher.name=[1]", r"teacher.name is \[1\] \(list\), expected str"),
        ("setting=foo", "setting is 'foo', expected one of transductive, inductive"),
    ],
)
def test_a_wrong_assignment_is_named(assignment, message):
    with pytest.raises(ValueError, match=message):
        of(assignments=[assignment])


def test_the_option_comes_before_the_teacher_of_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("teacher: {name: sage, lr: 0.5}")
    assert of(teacher="gcn", file=file).teacher.name == "gcn"
    # Several seeds take the name from there; the file's would train another teacher than the rows name.
    assert lasting_changes(file, []) == {"teacher": {"lr": 0.5}}


@pytest.mark.parametrize(
    ("dataset", "text", "assignments", "experts"),
    [
        ("academic-physics", "rbm: {num_experts: 2}", [], (2, 2)),
        (None, "rbm: {top_k: 9}", ["rbm.num_experts=16"], (16, 9)),
    ],
    ids=["preset", "set"],
)
def test_values_of_a_file_need_not_fit_the_defaults(tmp_path, dataset, text, assignments, experts):
    """Files are checked with the preset and ``--set``; the defaults have three of eight experts per row."""
    file = tmp_path / "run.yaml"
    file.write_text(text)
    config = of(dataset=dataset, preset="paper" if dataset else None, file=file, assignments=assignments)
    assert (config.rbm.num_experts, config.rbm.top_k) == experts
    (tmp_path / "config.yaml").write_text(of().to_yaml())
    file.write_text("rbm: {top_k: 9}")
    changed = configuration(None, None, None, {}, file, ["rbm.num_experts=16"], resumed=tmp_path)
    assert changed.rbm.top_k == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset: {a: 1}", r"dataset is \{'a': 1\}"),
        ("rbm: {top_k: 9}", "rbm.top_k is 9, expected between 1 and num_experts=8"),
        ("rmb: {top_k: 3}", "unknown setting rmb"),
        ("rbm: 3", "rbm is 3, expected a section"),
        ("teacher: {name: 3}", "teacher.name is 3"),
    ],
)
def test_a_wrong_value_in_a_file_is_named(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        of(file=tmp_path / "run.yaml")
