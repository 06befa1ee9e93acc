"""Mixed precision in every method: bfloat16 products, float32 weights, resumed runs, and about the same accuracy."""

from functools import partial

import pytest
import torch
from killed_runs import killed_and_resumed
from torch.nn.modules import module as modules

import rbm
from rbm.config import SETTINGS, Config
from rbm.distillation.registry import METHODS
from rbm.experiments.results import config_fingerprint
from rbm.training import loop

WITHOUT_PRODUCTS = ("trees",)
WITH_PROJECTION = ("nosmog", "tined_plus", "vqgraph")  # of hidden rows, which stays in float32
# What needs the hidden rows of a trace, the pairs of the released code, or a forward for each batch.
FURTHER = {
    "similarity": ("rbm", {"distill": {"similarity_weight": 0.1}}),
    "adversarial": ("mlp", {"distill": {"adversarial_weight": 0.1, "adversarial_steps": 2}}),
    "pairs": ("rbm", {"distill": {"forward": "pair", "batch_size": 32}}),
    "batches": ("rbm", {"distill": {"batch_size": 16, "step_per_batch": True}, "rbm": {"dropout": 0.3}}),
    "shared expert": ("rbm", {"rbm": {"shared_expert": True, "reset_dead_experts": 2, "norm": "layer"}}),
    "batch norm": ("mlp", {"rbm": {"norm": "batch", "num_layers": 3}}),
    "simmlp without sparse target": ("simmlp", {"simmlp": {"reconstruction_weight": 0.5, "predictor_layers": 2}}),
    "tined, part of the edges": ("tined", {"tined": {"energy_share": 0.5, "energy_weight": 0.5}}),
    "vqgraph with codes": ("vqgraph", {"vqgraph": {"code_weight": 0.5, "batch_size": 16}}),
}


@pytest.fixture
def mixed(quick) -> Config:
    return quick.updated({"precision": "bfloat16"})


@pytest.fixture
def dtypes():
    """Dtypes of the outputs of all linear and expert layers that train, filled while a test runs."""
    seen = set()

    def note(layer, _, output):
        if isinstance(layer, torch.nn.Linear | rbm.FusedRbMLayer) and layer.training:
            seen.add((output[0] if isinstance(output, tuple) else output).dtype)

    handle = modules.register_module_forward_hook(note)
    yield seen
    handle.remove()


def trained(graph, config, method, **options):
    return rbm.distill(
        graph,
        config=config,
        methods=[method],
        labels_alone=False,
        measure_latency=False,
        unseen_fraction=0.4,
        **options,
    )


def check(found, method, graph) -> None:
    """The student is float32, and the reported accuracy is that of its float32 predictions."""
    student = found.students[method]
    tensors = [*student.parameters(), *student.buffers(), found.teacher_logits]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float32}
    tested = found.split.unseen_nodes if len(found.split.unseen_nodes) else graph.test_mask
    right = student(found.student_inputs(method))[tested].argmax(-1) == graph.y[tested]
    assert right.float().mean().item() == pytest.approx(found.summary[method]["test_accuracy"])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(small_graph, mixed, dtypes, method, setting):
    found = trained(small_graph, mixed.updated({"setting": setting}), method)
    check(found, method, small_graph)
    expected = set() if method in WITHOUT_PRODUCTS else {torch.bfloat16}
    assert dtypes == expected | ({torch.float32} if method in WITH_PROJECTION else set()), "in every phase"


@pytest.mark.parametrize("name", FURTHER)
def test_further_settings_train(small_graph, mixed, name):
    method, changes = FURTHER[name]
    check(trained(small_graph, mixed.updated(changes), method), method, small_graph)


@pytest.mark.parametrize("method", ["mlp", "rbm", "moe", "glnn", "simmlp", "vqgraph"])
def test_sparse_features(small_graph, mixed, method):
    small_graph.x = (small_graph.x * (small_graph.x > 0)).to_sparse_csr()
    check(trained(small_graph, mixed, method), method, small_graph)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in WITHOUT_PRODUCTS])
def test_float32_has_no_autocast(small_graph, quick, monkeypatch, dtypes, method):
    monkeypatch.setattr(loop, "autocast", None)  # a call raises
    trained(small_graph, quick.updated({"precision": "float32"}), method)
    assert torch.bfloat16 not in dtypes


@pytest.mark.parametrize(("method", "epoch"), [("rbm", 8), ("moe", 8), ("labels", 8), ("nosmog", 5)])
def test_resumes_to_the_same_bits(small_graph, quick, tmp_path, method, epoch):
    options = {"methods": [method], "measure_latency": False, "config": quick.updated({"precision": "bfloat16"})}
    whole = rbm.distill(small_graph, folder=tmp_path / "whole", **options)
    resumed = killed_and_resumed(small_graph, tmp_path / "killed", method, epoch, **options)
    assert resumed.summary == whole.summary
    states = whole.student.state_dict(), resumed.student.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_run_keeps_its_precision(small_graph, mixed, tmp_path):
    run = partial(trained, small_graph, method="mlp", folder=tmp_path / "run")
    run(config=mixed)
    with pytest.raises(ValueError, match=r"precision \(was bfloat16, now float32\)"):
        run(config=mixed.updated({"precision": "float32"}), resume=True)
    run(config=mixed, resume=True)


@pytest.mark.parametrize("method", ["mlp", "labels"])
def test_the_cache_keeps_precisions_apart(small_graph, quick, tmp_path, method):
    run = partial(trained, small_graph, method=method)
    expected = run(config=quick)
    run(config=quick.updated({"precision": "bfloat16"}), cache=tmp_path)
    found = run(config=quick, cache=tmp_path)
    assert torch.equal(found.teacher_logits, expected.teacher_logits)
    assert torch.equal(found.student.layers[0].weight, expected.student.layers[0].weight)


def test_about_as_accurate_on_digits(quick):
    digits = rbm.load_dataset("digits")
    config = quick.updated({"mlp": {"max_epochs": 40}, "rbm": {"max_epochs": 40}})
    accuracies = {}
    for precision in ("float32", "bfloat16"):
        methods = {"methods": ["mlp", "rbm"], "labels_alone": False, "measure_latency": False}
        found = rbm.distill(digits, config=config.updated({"precision": precision}), **methods)
        accuracies[precision] = [found.summary[name]["val_accuracy"] for name in ("teacher", "mlp", "rbm")]
    assert accuracies["bfloat16"] != accuracies["float32"], "or the precision has no effect"
    assert accuracies["bfloat16"] == pytest.approx(accuracies["float32"], abs=0.04)


def test_the_fingerprint_of_a_row_tells_bfloat16_from_the_default():
    config = Config()
    for method in ("teacher", "rbm"):
        default, explicit, mixed = (
            config_fingerprint(changed, method)
            for changed in (
                config,
                config.updated({"precision": "float32"}),
                config.updated({"precision": "bfloat16"}),
            )
        )
        assert default == explicit != mixed


def test_float16_is_refused():
    with pytest.raises(ValueError, match=r"precision is 'float16', expected float32 or bfloat16 \(float16 would need"):
        Config(precision="float16")
