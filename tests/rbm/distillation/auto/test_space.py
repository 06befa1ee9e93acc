"""The space of a search."""

from dataclasses import asdict

import pytest

from rbm.config import Config, flat
from rbm.config.presets import features_only, preset_config
from rbm.distillation.auto.space import DEFAULTS, GIVEN, MODULE, Space, encoding_of
from rbm.distillation.registry import METHODS


def first(_, choices):
    return choices[0]


def test_a_named_graph_has_its_preset_and_the_defaults():
    given = preset_config("clean", "cora")
    space = Space(given, ("mlp", "rbm"))
    assert list(space.bases) == [GIVEN, DEFAULTS]
    assert space.config(space.draw(first)) == given
    starts = [space.config(point) for point in space.starts()]
    assert starts[:2] == [given, given]
    changed = {name for name, value in flat(asdict(starts[2])).items() if value != flat(asdict(Config()))[name]}
    assert changed == {"dataset"}, "beside the name, the defaults"


def test_an_unknown_graph_has_the_defaults_alone():
    assert list(Space(Config(), ("mlp",)).bases) == [GIVEN]
    assert list(Space(preset_config("clean", "graphs/mine.npz"), ("mlp",)).bases) == [GIVEN]


def test_what_a_user_sets_holds_for_the_defaults_and_every_teacher():
    given = preset_config("clean", "cora").updated({"teacher": {"max_epochs": 7}, "rbm": {"max_epochs": 9}})
    space = Space(given, ("mlp", "rbm"))
    for point in [*space.starts(), *space.openings()]:
        config = space.config(point)
        assert (config.teacher.max_epochs, config.rbm.max_epochs) == (7, 9)
        assert config.teacher.name == point["teacher"]


def test_a_teacher_has_its_own_settings():
    space = Space(preset_config("clean", "cora"), ("mlp",))
    points = {point["teacher"]: point for point in space.openings()}
    for name in ("gcn", "gat", "appnp"):
        assert space.config(points[name]).teacher == preset_config("clean", "cora", teacher=name).teacher
    # The paper tunes no GAT: its students are GraphSAGE's.
    assert space.config(points["gat"]).mlp == space.given.mlp


def test_presets_of_the_paper_leave_out_teachers_that_it_has_none_of():
    assert Space(preset_config("official", "cora"), ("mlp",)).teachers == ("sage", "gcn")


def test_a_teacher_that_is_given_stays():
    assert Space(Config(), ("mlp",), "gcn").teachers == ("gcn",)
    space = Space(Config(), ("mlp",), MODULE)
    assert space.config(space.starts()[0]) == Config()
    assert {point["teacher"] for point in (*space.starts(), *space.openings())} == {MODULE}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_settings_that_there_are(method):
    space = Space(preset_config("clean", "cora"), (method,))
    assert space.settings[method]
    for name, values in space.settings[method].items():
        assert len(values) > 1
        for value in values:
            config = space.config(space.draw(first) | {name: value})
            assert flat(asdict(config))[name] == value


def test_students_of_features_alone_have_no_encodings_to_choose():
    space = Space(features_only(preset_config("clean", "amazon-photo")), ("mlp", "rbm"), features_only=True)
    points = [*space.starts(), *space.openings()]
    assert {point["start"] for point in points} == {GIVEN, DEFAULTS}
    assert {point["encoding"] for point in points} == {"none"}
    for point in points:
        assert space.config(point) == features_only(space.config(point))


@pytest.mark.parametrize(("methods", "run"), [(("tined",), ()), (("mlp",), ("mlp", "tined_plus"))])
def test_only_teachers_that_all_methods_support_are_searched(methods, run):
    assert Space(Config(), methods, run=run).teachers == ("sage", "mlp", "gcn", "appnp")


def test_a_method_of_ones_own_has_teachers_and_encodings(monkeypatch):
    monkeypatch.setitem(METHODS, "own", METHODS["mlp"])
    space = Space(Config(), ("own",))
    assert space.settings == {"own": {}}
    assert set(space.draw(first)) == {"start", "method", "teacher", "encoding"}


@pytest.mark.parametrize("name", ["none", "walks", "labels", "both"])
def test_encodings(name):
    space = Space(Config(), ("mlp",))
    config = space.config(space.starts()[0] | {"encoding": name})
    assert encoding_of(config) == name
    assert config.encoding.walk_length == Config().encoding.walk_length
