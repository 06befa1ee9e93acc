"""Ctrl-C and SIGTERM: one sentence on how to continue, no process left behind, and the run can be continued."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from rbm_process import RbmProcess, interruptible

pytestmark = pytest.mark.slow
QUICK = ["--set", "teacher.max_epochs=3", "--set", "encoding.deepwalk=false", "--no-plots", "--method", "rbm"]
LONG = [*QUICK, "--set", "rbm.max_epochs=100000", "--set", "rbm.patience=100000"]


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "rbm", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with interruptible():
        return subprocess.Popen(command, cwd=folder, start_new_session=True, **pipes)


def wait_until(what, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come so far"
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_run_says_how_it_is_continued(tmp_path, number, name):
    run = RbmProcess("distill", *LONG, "--out", "run", cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and '"rbm"' in metrics.read_text())
    run.send_signal(number)
    out, err = run.finish(timeout=60)
    assert run.returncode == 128 + number
    assert out == ""
    said = f"Error: {name}; what is done so far is kept; continue by rbm distill --out run --resume --method rbm"
    assert err.strip().splitlines()[-1] == f"{said} --no-plots"
    assert "Traceback" not in err
    assert not list((tmp_path / "run").glob(".*.partial"))
    # The run continues with its trained teacher. Its configuration is edited to be short, which --set would not allow.
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(text.replace("max_epochs: 100000", "max_epochs: 3"))
    (tmp_path / "run" / "checkpoint.pt").unlink(missing_ok=True)
    resumed = RbmProcess("distill", "--out", "run", "--resume", "--no-plots", "--method", "rbm", cwd=tmp_path)
    _, err = resumed.finish()
    assert resumed.returncode == 0, err
    assert "teacher: finished before" in err


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc for the children of a process")
def test_worker_processes_end_with_an_interrupted_command(tmp_path):
    run = start(tmp_path, "distill", *LONG, "--seeds", "0-3", "--jobs", "2")

    def workers() -> list[str]:
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        return [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]

    try:
        wait_until(lambda: len(workers()) == 2 and any((tmp_path / "runs" / "cache").glob("teacher-*")))
        left = workers()
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=60)
        assert run.returncode == 130
        assert err.strip().splitlines()[-1].endswith("what is done so far is kept; continue by the same command")
        assert "Traceback" not in err
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), 60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


@pytest.mark.parametrize("stored", [(), ("config.yaml",), ("auto.yaml",)])
def test_a_run_without_settings_is_continued_by_the_same_command(command, monkeypatch, tmp_path, stored):
    def interrupted(*_, **__):
        for name in stored:
            (tmp_path / name).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("rbm.distillation.distill.distill", interrupted)
    _, _, err = command("distill", "--out", tmp_path, "--method", "mlp, rbm")
    advised = f"rbm distill --out {tmp_path} --resume --method 'mlp, rbm'" if stored else "the same command"
    assert err.strip().endswith(f"continue by {advised}")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_that_was_not_replaced_yet_is_not_resumed(command, monkeypatch, tmp_path, replaced):
    """Regression test: --overwrite and an early Ctrl-C advised to resume the run that was to be replaced."""
    (tmp_path / "config.yaml").write_text("preset: clean\n")

    def interrupted(*_, **__):
        if replaced:
            (tmp_path / "config.yaml").unlink()
            (tmp_path / "config.yaml").write_text("preset: clean\n")
        raise KeyboardInterrupt

    monkeypatch.setattr("rbm.distillation.distill.distill", interrupted)
    _, _, err = command("distill", "--out", tmp_path, "--overwrite")
    advised = f"rbm distill --out {tmp_path} --resume" if replaced else "the same command"
    assert err.strip().endswith(f"continue by {advised}")


def test_a_resumed_run_says_so_while_its_graph_is_read(command, monkeypatch, tmp_path):
    (tmp_path / "config.yaml").write_text("preset: clean\n")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("rbm.distillation.run_graph.graph_of_resumed_run", interrupted)
    _, _, err = command("distill", "--out", tmp_path, "--resume")
    assert err.strip().endswith(f"continue by rbm distill --out {tmp_path} --resume")


def test_advice_quotes_what_the_shell_would_take_apart(command, monkeypatch, tmp_path):
    folder = tmp_path / "my run"

    def interrupted(*_, **__):
        folder.mkdir()
        (folder / "config.yaml").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("rbm.distillation.distill.distill", interrupted)
    _, _, err = command("distill", "--out", folder)
    assert err.strip().endswith(f"continue by rbm distill --out '{folder}' --resume")


def test_advice_has_the_options_that_the_folder_does_not_store(command, monkeypatch, tmp_path):
    """Regression test: without --cache, the continued run trained the teacher and encodings again."""
    monkeypatch.setattr("rbm.utils.plugins._loaded", ["/my plugin.py"])

    def interrupted(*_, **__):
        (tmp_path / "config.yaml").write_text("preset: clean\n")
        raise KeyboardInterrupt

    monkeypatch.setattr("rbm.distillation.distill.distill", interrupted)
    given = ("--device", "cpu", "--cache", tmp_path / "my cache", "--no-plots")
    _, _, err = command("distill", "--out", tmp_path, "--seed", "3", *given)
    shown = f"rbm --plugin '/my plugin.py' distill --out {tmp_path} --resume --device cpu --cache '{tmp_path}/my cache'"
    assert err.strip().endswith(f"continue by {shown} --no-plots")
    _, _, err = command("distill", "--out", tmp_path, "--resume", "--tensorboard", "--plots")
    assert err.strip().endswith(f"distill --out {tmp_path} --resume --tensorboard --plots")


def test_settings_that_a_killed_run_did_not_store_are_asked_for(command, tmp_path):
    (tmp_path / ".run.lock").touch()
    status, _, err = command("distill", "--out", tmp_path, "--resume")
    assert status == 2
    assert "its run ended before it stored its settings; repeat the whole command that started it" in err
