"""All methods: they learn, none reads a test label, and a resumed run ends with the same numbers."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from killed_runs import killed_at

import rbm
from rbm.config import SETTINGS
from rbm.datasets.splits import split_graph
from rbm.distillation.registry import METHODS
from rbm.nn.students import EnsembleStudent
from rbm.training.run_folder import read_metrics

# Every random choice that a method may make in an epoch is enabled here.
RESTLESS = {
    "distill": {"draw": "sample", "batch_size": 16, "step_per_batch": True},
    "mlp": {"dropout": 0.3},
    "rbm": {"dropout": 0.3},
    "moe": {"dropout": 0.3},
    "glnn": {"batch_size": 16, "label_weight": 0.3},
    "nosmog": {"batch_size": 16},
    "cohop": {"num_layers": 2, "hidden_channels": 16, "dropout": 0.5},
    "sign": {"label_weight": 0.5},
    "vqgraph": {"batch_size": 16, "dropout": 0.3, "code_weight": 0.5},
    "tined": {"batch_size": 16, "dropout": 0.3, "energy_share": 0.5, "propagation_init": "random"},
    "tined_plus": {"batch_size": 16, "dropout": 0.3, "energy_share": 0.5},
}
KILLED_IN = {
    "ensemble": "ensemble-1",
    "cohop": "cohop-1",
    "trees": "trees-rounds",
    "simmlp": "simmlp-alignment",
    ("simmlp", 30): "simmlp",
    "vqgraph": "vqgraph-tokenizer",
    ("vqgraph", 6): "vqgraph",
}
LIKE_THE_TEACHER = ("tined", "tined_plus")  # one layer per transformation and per propagation of the teacher
# At the end of pretraining, if a method has it, and after it; from a checkpoint, and from the start of the phase.
KILLS = [*((method, 5, checkpoints) for method in METHODS for checkpoints in (True, False)), ("moe", 8, True)]
KILLS += [("simmlp", 30, checkpoints) for checkpoints in (True, False)]
KILLS += [("vqgraph", 6, True)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def digits():
    return rbm.load_dataset("digits")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_learns_the_default_graph_and_is_loaded_again(digits, quick, cache, tmp_path, method, setting):
    config = quick.updated({"setting": setting})
    result = rbm.distill(digits, config=config, methods=[method], folder=tmp_path, cache=cache, measure_latency=False)
    tested = split_graph(digits, setting).unseen_nodes if setting == "inductive" else digits.test_mask
    majority = digits.y[tested].bincount().max() / len(digits.y[tested])
    accuracy = result.summary[method]["test_accuracy"]
    assert accuracy > majority + 0.5
    logits = result.student(result.student_inputs())
    right = logits[tested].argmax(-1) == digits.y[tested]
    assert right.float().mean().item() == pytest.approx(accuracy), "the student is the one reported"
    assert torch.equal(rbm.load_student(tmp_path)(result.student_inputs()), logits)


def test_the_plain_student_has_rbms_shape_unless_it_is_given_one(small_graph, quick, cache):
    shape = {"rbm": {"hidden_channels": 10, "num_layers": 3, "norm": "layer"}}

    def widths(changes):
        config = quick.updated(shape).updated(changes)
        found = rbm.distill(small_graph, config=config, methods=["mlp"], cache=cache, measure_latency=False)
        return [layer.out_features for layer in found.student.layers], type(found.student.norms[0]).__name__

    assert widths({}) == ([10, 10, 3], "LayerNorm")
    own = {"mlp": {"hidden_channels": 6, "num_layers": 2, "norm": "none"}}
    assert widths(own) == ([6, 3], "Identity")
    assert widths({**own, "inflate": 2}) == ([12, 3], "Identity")


def test_methods_do_not_depend_on_each_other(small_graph, quick, cache):
    run = partial(rbm.distill, small_graph, config=quick.updated(RESTLESS), cache=cache, measure_latency=False)
    together = run(methods=list(reversed(METHODS)))
    for method in METHODS:
        alone = run(methods=[method])
        assert together.summary[method] == alone.summary[method]
        theirs = together.students[method].state_dict()
        assert all(torch.equal(theirs[name], tensor) for name, tensor in alone.student.state_dict().items())


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_no_student_reads_a_test_label(small_graph, quick, cache, method, setting):
    lying = small_graph.clone()
    lying.y = torch.where(small_graph.test_mask, (small_graph.y + 1) % 3, small_graph.y)
    config = quick.updated({"setting": setting})
    truth, planted = (
        rbm.distill(graph, config=config, methods=[method], cache=cache, unseen_fraction=0.4, measure_latency=False)
        for graph in (small_graph, lying)
    )
    assert truth.summary[method]["test_accuracy"] != planted.summary[method]["test_accuracy"]
    assert truth.summary[method]["val_accuracy"] == planted.summary[method]["val_accuracy"]
    states = truth.student.state_dict(), planted.student.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert torch.equal(truth.student(truth.student_inputs()), planted.student(planted.student_inputs()))


@pytest.mark.parametrize(("method", "epoch", "checkpoints"), KILLS)
def test_resumes_to_the_same_bits(small_graph, quick, cache, tmp_path, method, epoch, checkpoints):
    run = partial(
        rbm.distill,
        small_graph,
        config=quick.updated(RESTLESS),
        methods=[method],
        cache=cache,
        measure_latency=False,
    )
    run(folder=tmp_path / "whole")
    phase = KILLED_IN.get((method, epoch), KILLED_IN.get(method, method))
    with killed_at(phase, epoch, checkpoint_seconds=-1.0 if checkpoints else 1e9):
        run(folder=tmp_path / "killed")
    assert (tmp_path / "killed" / "checkpoint.pt").exists() == checkpoints
    assert not (tmp_path / "killed" / "summary.json").exists()

    run(folder=tmp_path / "killed", resume=True)
    for name in (f"{method}.safetensors", "summary.json", "student.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    records = [
        [{key: value for key, value in record.items() if key != "seconds"} for record in read_metrics(tmp_path / name)]
        for name in ("killed", "whole")
    ]
    assert [r for r in records[0] if r["phase"] != "teacher"] == [r for r in records[1] if r["phase"] != "teacher"]


def test_finished_students_are_taken_from_the_run_folder(small_graph, quick, cache, tmp_path):
    methods = [*(method for method in METHODS if method != "cohop"), "cohop"]
    run = partial(rbm.distill, small_graph, config=quick, methods=methods, cache=cache, measure_latency=False)
    whole = run()
    with killed_at("cohop-2", 3):
        run(folder=tmp_path)
    resumed = run(folder=tmp_path, resume=True)
    assert resumed.summary == whole.summary
    for method in methods:
        logits = (result.students[method](result.student_inputs(method)) for result in (whole, resumed))
        assert torch.equal(*logits), method
    records = [(record["phase"], record["epoch"]) for record in read_metrics(tmp_path)]
    assert len(records) == len(set(records)), "none was trained again"


def test_inflated_students_are_wider(small_graph, quick, cache):
    def widths(inflate: int) -> dict[str, int]:
        config = quick.updated({"inflate": inflate, "cohop": {"num_layers": 2, "hidden_channels": 16}})
        result = rbm.distill(small_graph, config=config, methods=list(METHODS), cache=cache, measure_latency=False)
        found = {}
        for method, student in result.students.items():
            if method == "trees":
                continue  # methods without a width
            layers = (student.members[0] if isinstance(student, EnsembleStudent) else student).layers
            assert len(layers) == (4 if method in LIKE_THE_TEACHER else 2)
            found[method] = layers[len(layers) // 2 - 1].out_features
        return found

    plain, inflated = widths(1), widths(8)
    for method in ("labels", *LIKE_THE_TEACHER):
        assert (plain.pop(method), inflated.pop(method)) == (16, 16), "its width is the teacher's"
    like_rbm = ("mlp", "rbm", "moe", "ensemble")
    assert plain == {method: 32 if method in like_rbm else 16 if method == "cohop" else 64 for method in plain}
    assert inflated == {method: 8 * width for method, width in plain.items()}


def test_the_time_of_encodings_is_that_of_all_sections(small_graph, quick, cache, monkeypatch):
    config = quick.updated({"nosmog": {"encoding": {"embedding_dim": 6}}})
    ticks = iter(range(10_000))
    # Only that module's clock is replaced: other code reads the clock too, as often as the load of the machine allows.
    monkeypatch.setattr("rbm.utils.timings.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    result = rbm.distill(small_graph, config=config, methods=["mlp", "nosmog"], cache=cache, measure_latency=False)
    assert result.timings["encodings"]["seconds"] == 2, "one by this clock for each"
