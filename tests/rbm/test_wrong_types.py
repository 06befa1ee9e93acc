"""Arguments of another type: the error of a public function names the argument, the value and what is expected."""

import pytest

import rbm
from rbm.distillation.distill import distill
from rbm.experiments.tuning.run import tune
from rbm.serving.latency import measure_run
from rbm.serving.server import make_app

NO_PATH = "expected a path, as str or pathlib.Path"


def untrained(graph, **options):
    """A run that must be refused before its teacher is trained, which may take hours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rbm.distillation.distill.prepare_teacher", lambda *arguments, **named: pytest.fail("trained"))
        distill(graph, **options)


MLP = rbm.MLPStudent(2, 2, 2)
CALLS = {
    rf"folder is None, {NO_PATH}": lambda graph: rbm.load(None),
    rf"folder is 3, {NO_PATH}": lambda graph: rbm.load_encodings(3),
    rf"dataset is \[1\], {NO_PATH}": lambda graph: rbm.load_graph([1]),
    rf"configuration file is 3, {NO_PATH}": lambda graph: rbm.Config.from_yaml(3),
    rf"source is 3, {NO_PATH}": lambda graph: rbm.load_released(3, top_k=2),
    rf"folder is 3.5, {NO_PATH}": lambda graph: distill(graph, folder=3.5),
    rf"cache is 3, {NO_PATH}": lambda graph: distill(graph, cache=3),
    "seed is 'a', expected a whole number": lambda graph: rbm.load_graph("graph.npz", seed="a"),
    "seed is 2.5, expected a whole number": lambda graph: rbm.load_graph("graph.npz", seed=2.5),
    "undirected is 'a', expected True or False": lambda graph: rbm.load_graph("graph.npz", undirected="a"),
    "unseen_fraction is 'a', expected a number": lambda graph: distill(graph, unseen_fraction="a"),
    "methods is 3, expected a list of names, such as": lambda graph: distill(graph, methods=3),
    "encodings is 3, expected a list of tensors, such as": lambda graph: distill(graph, encodings=3),
    r"encodings\[0\]: got int, expected a dense floating tensor": lambda graph: untrained(graph, encodings=[3]),
    r"encodings\[0\]: got shape \[12\], expected \[60, width\]": lambda graph: untrained(graph, encodings=graph.x),
    "console is 3, expected a rich.console.Console": lambda graph: distill(graph, console=3),
    "console is True, expected a rich.console.Console": lambda graph: distill(graph, console=True),
    "plots is 'a', expected True or False": lambda graph: distill(graph, plots="a"),
    "auto is 'no', expected True or False": lambda graph: distill(graph, auto="no"),
    r"changes is \[1\], expected settings by name": lambda graph: rbm.Config().updated([1]),
    r"dataset is 3 \(int\), expected str": lambda graph: rbm.Config(3),
    r"format is \['onnx'\], expected one of torch-export": lambda graph: rbm.export_student(MLP, ["onnx"]),
    "batch_sizes: got 64, expected whole numbers": lambda graph: measure_run("run", batch_sizes=64),
    r"batch_sizes: got \['1'\], expected whole numbers": lambda graph: measure_run("run", batch_sizes=["1"]),
    "repeats: got 2.5, expected a whole number": lambda graph: measure_run("run", repeats=2.5),
    r"limits is \{'rows': 5\}, expected Limits\(": lambda graph: make_app(MLP, limits={"rows": 5}),
    "config is a dict, expected an rbm.Config": lambda graph: tune({}, "search"),
}


@pytest.mark.parametrize("message", CALLS)
def test_the_argument_is_named(small_graph, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        CALLS[message](small_graph)
