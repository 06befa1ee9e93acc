"""TensorBoard gets exactly the same records as metrics.jsonl, also after kills."""

import sys

import pytest
import torch

from rbm import distill
from rbm.config import Config
from rbm.training.metrics import expert_loads
from rbm.training.run_folder import RunFolder, read_metrics
from rbm.training.tensorboard import events

CONFIG = Config().updated(
    {
        "teacher": {"max_epochs": 3},
        "mlp": {"max_epochs": 3},
        "rbm": {"max_epochs": 4, "pretrain_epochs": 2, "hidden_channels": 8, "num_experts": 4},
        "moe": {"max_epochs": 3, "pretrain_epochs": 1},
        "encoding": {"deepwalk": False},
    }
)
RECORD = {"loss": 0.5, "train_accuracy": 0.5, "val_accuracy": 0.25, "test_accuracy": 0.125, "seconds": 0.1}


@pytest.fixture(autouse=True)
def _tensorboard():
    pytest.importorskip("tensorboard")


def scalars(folder):
    """``(phase, tag, epoch) -> value`` of all event files, read with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for path in sorted((folder / "tensorboard").iterdir()):
        reader = EventAccumulator(str(path)).Reload()
        for tag in reader.Tags()["scalars"]:
            for event in reader.Scalars(tag):
                assert (path.name, tag, event.step) not in found, "an epoch stands there twice"
                found[path.name, tag, event.step] = event.value
    return found


def expected(folder):
    found = {}
    for record in read_metrics(folder):
        key = record["phase"], record["epoch"]
        values = {"loss": record["loss"], "seconds": record["seconds"]}
        values |= {f"accuracy/{name}": record[f"{name}_accuracy"] for name in ("train", "val", "test")}
        for layer, shares in enumerate(record.get("expert_load", [])):
            values |= {f"expert_load/layer{layer}/expert{i}": share for i, share in enumerate(shares)}
        found |= {(key[0], tag, key[1]): value for tag, value in values.items()}
    return found


def test_the_numbers_of_the_metrics(small_graph, tmp_path):
    folder = tmp_path / "run"
    result = distill(
        small_graph,
        config=CONFIG,
        folder=folder,
        methods=["mlp", "moe", "rbm"],
        tensorboard=True,
        measure_latency=False,
    )
    found = scalars(folder)
    assert found == pytest.approx(expected(folder), rel=1e-6)
    assert {phase for phase, _, _ in found} == {"teacher", "mlp", "moe", "rbm", "labels"}
    loads = {epoch: value for phase, tag, epoch in found for value in [tag] if phase == "rbm" and "expert_load" in tag}
    assert sorted(loads) == [2, 3, 4, 5], "while pretraining nothing is routed"
    assert not any("expert_load" in tag for phase, tag, _ in found if phase in ("teacher", "mlp"))
    best = result.summary["rbm"]["best_epoch"]
    at_best = [[found["rbm", f"expert_load/layer{i}/expert{e}", best] for e in range(4)] for i in range(2)]
    torch.testing.assert_close(
        torch.tensor(at_best), expert_loads(result.students["rbm"], result.student_inputs("rbm"))
    )


def test_watching_changes_no_result(small_graph, tmp_path):
    plain = distill(small_graph, config=CONFIG, folder=tmp_path / "plain", measure_latency=False)
    watched = distill(small_graph, config=CONFIG, folder=tmp_path / "seen", measure_latency=False, tensorboard=True)
    assert plain.summary == watched.summary
    assert not (tmp_path / "plain" / "tensorboard").exists()
    assert not any("expert_load" in record for record in read_metrics(tmp_path / "plain"))
    for name, tensor in plain.student.state_dict().items():
        assert torch.equal(tensor, watched.student.state_dict()[name])


def test_after_a_kill_the_events_are_those_of_the_metrics(tmp_path):
    folder = RunFolder(tmp_path, Config())
    folder.append_metrics({"phase": "teacher", "epoch": 0, **RECORD})  # before TensorBoard was enabled
    with events(folder):
        for epoch in range(5):
            folder.append_metrics({"phase": "rbm", "epoch": epoch, **RECORD, "expert_load": [[0.25, 0.75]]})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"phase": "rbm", "epo')  # the kill
    resumed = RunFolder(tmp_path, Config(), resume=True)
    with events(resumed):
        resumed.keep_metrics("rbm", 3)
        resumed.append_metrics({"phase": "rbm", "epoch": 3, **RECORD, "loss": 0.125})
    found = scalars(tmp_path)
    assert found == pytest.approx(expected(tmp_path))
    assert sorted(epoch for phase, tag, epoch in found if (phase, tag) == ("rbm", "loss")) == [0, 1, 2, 3]
    assert found["rbm", "loss", 3] == 0.125
    assert ("teacher", "loss", 0) in found


def test_overwriting_a_run_takes_its_events_away(tmp_path):
    folder = RunFolder(tmp_path / "run", Config())
    with events(folder):
        folder.append_metrics({"phase": "rbm", "epoch": 0, **RECORD})
    mine = tmp_path / "run" / "tensorboard" / "notes.txt"
    mine.write_text("mine")
    RunFolder(tmp_path / "run", Config(), overwrite=True)
    assert [path for path in (tmp_path / "run" / "tensorboard").rglob("*") if path.is_file()] == [mine]


def test_command_line(command, tmp_path):
    quick = [f"--set={section}.max_epochs=2" for section in ("teacher", "rbm")] + ["--set=encoding.deepwalk=false"]
    run = ["distill", "--method", "rbm", "--no-plots", "--out", tmp_path / "run", "--cache", tmp_path / "cache"]
    assert command(*run, *quick, "--tensorboard")[0] == 0
    assert scalars(tmp_path / "run") == pytest.approx(expected(tmp_path / "run"), rel=1e-6)


def test_faults(monkeypatch, command, small_graph, tmp_path):
    with pytest.raises(ValueError, match="tensorboard is True but folder is None"):
        distill(small_graph, tensorboard=True)
    status, _, said = command("distill", "--seeds", "0-1", "--tensorboard")
    assert (status, "--tensorboard is about a run folder, and --seeds leaves none" in said) == (2, True)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    out = tmp_path / "run"
    status, _, said = command("distill", "--tensorboard", "--out", out)
    assert status == 2
    assert "tensorboard is asked for and not installed: pip install 'rbm-kernels[tensorboard]'" in said
    assert not out.exists()
