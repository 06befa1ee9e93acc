"""The command line: output, files and messages of its commands."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from rbm import Config, __version__, distill, load_student
from rbm.distillation.summary import results_table
from rbm.experiments.analysis import STUDIES
from rbm.experiments.paper_tables import table_names
from rbm.experiments.results import ACCURACIES, COLUMNS, append_rows
from rbm.serving.latency import latency_table
from rbm.utils.console import print_table
from rbm.utils.files import read_csv

QUICK = ["--set", "teacher.max_epochs=8", "--set", "mlp.max_epochs=8", "--set", "rbm.max_epochs=8"]
QUICK += ["--set", "rbm.hidden_channels=16", "--set", "rbm.pretrain_epochs=2"]


@pytest.fixture
def rbm(command, monkeypatch, tmp_path):
    """Run a command in a fresh folder, on a wide terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rbm.cli.console.width", 200, raising=False)
    return command


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    command = [sys.executable, "-m", "rbm", "distill", *QUICK, "--plots", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_distill_shows_a_table_and_leaves_a_run_folder(run_folder):
    folder, done = run_folder
    for text in ("Teacher", "MLP student", "RbM student", "Test max", "digits, transductive, sage teacher, seed 0"):
        assert text in done.stdout
    assert re.search(r"Time: [\d.]+ s \(teacher [\d.]+, encodings .*latency .*saving", " ".join(done.stdout.split()))
    assert re.search(r"rbm .*8/10 |10/10", done.stderr), "progress goes to standard error"
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "rbm.safetensors", "student.json", "summary.json"} <= names
    assert {
        "report.html",
        "report.json",
        "training.png",
        "expert_load.png",
        "results.md",
        "timings.json",
    } <= names
    assert not {"checkpoint.pt", "representation.png"} & names, "t-SNE takes seconds: rbm report --tsne asks for it"
    listed = json.loads((folder / "run.json").read_text())["files"]
    locks = {".run.lock", ".run.json.lock"}
    assert names - {"run.json"} - locks <= set(listed), "all that --overwrite is to remove is on the list"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [sum(r["phase"] == phase for r in records) for phase in ("teacher", "mlp", "rbm")] == [8, 8, 10]
    summary = json.loads((folder / "summary.json").read_text())
    assert f"{summary['rbm']['test_accuracy']:.2%}" in (folder / "results.md").read_text()


def test_version_and_help(rbm):
    status, out, _ = rbm("--version")
    assert (status, out.strip()) == (0, f"rbm {__version__}")
    status, out, _ = rbm("reproduce", "--help")
    text = " ".join(out.replace("│", " ").split())
    assert status == 0
    for name in (*table_names(), *STUDIES):
        assert name in text
    assert "(default: the table's)" in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_tables_fit_and_no_figure_is_cut(run_folder, width):
    """For two models with long names and many parameters."""
    summary, timings = (json.loads((run_folder[0] / f"{name}.json").read_text()) for name in ("summary", "timings"))
    summary["tined_plus"] = {**summary["rbm"], "parameters": 123_456_789, "active_parameters": 999_999}
    summary["teacher"]["parameters"] = 999_999
    timings["teacher"] |= {"one_node_ms": 1234.56, "all_nodes_ms": 98765.4}
    found = {"dataset": "own graph", "nodes": 2_449_029, "device": "cuda:0", "threads": 16, "student": "rbm"}
    row = {"model": "rbm", "title": "Teacher, with neighbourhood", "batch_size": 1_048_576}
    found["rows"] = [{**row, "p50_ms": 0.0123, "p95_ms": 12.34, "p99_ms": 98765.4}]
    console = Console(file=io.StringIO(), width=width)
    print_table(console, results_table(summary, timings))
    print_table(console, latency_table(found))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= max(width, 80), "a narrower terminal wraps the lines"
    assert "…" not in text
    figures = ("123.46 M", "999,999", "1234.56", "98765.4", "1,048,576", "0.012", "12.3", "98,765", "(ms)")
    for figure in figures:
        assert figure in text


def test_predict(rbm, run_folder, tmp_path):
    folder, _ = run_folder
    x, encodings = torch.rand(7, 64), load_file(folder / "encodings.safetensors")["encodings"]
    # Row 0 is joined to nodes 4 and 5, row 6 to no node, and all other rows to node 9.
    joined = [(0, 4), (0, 5), *((row, 9) for row in range(1, 6))]
    np.save("neighbors.npy", np.array(joined))
    np.savetxt("neighbors.csv", np.array(joined), delimiter=",", fmt="%d")
    theirs = torch.stack([encodings[4:6].mean(0), *[encodings[9]] * 5, torch.zeros(encodings.shape[1])])
    whole = torch.cat([x, theirs], dim=1)
    probabilities = torch.softmax(load_student(folder)(whole), dim=-1)
    np.save("x.npy", x.numpy())
    assert rbm("predict", folder, "x.npy", "--neighbors", "neighbors.npy")[0] == 0
    lines = [line.split(",") for line in (tmp_path / "predictions.csv").read_text().splitlines()]
    assert lines[0] == ["row", "class", "probability"]
    assert [int(line[1]) for line in lines[1:]] == probabilities.argmax(-1).tolist()
    assert float(lines[3][2]) == pytest.approx(probabilities[2].max().item(), abs=1e-6)

    np.savez("x.npz", x=x.numpy())
    assert rbm("predict", folder, "x.npz", "--neighbors", "neighbors.csv", "--out", "all.npy")[0] == 0
    np.testing.assert_allclose(np.load("all.npy"), probabilities.detach().numpy(), atol=1e-6)
    np.savetxt("x.csv", whole.numpy(), delimiter=",")
    assert rbm("predict", folder, "x.csv", "--out", "again.npy")[0] == 0
    np.testing.assert_allclose(np.load("again.npy"), probabilities.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0,1\n7,1\n", r"pair 1 \(counted from 0\) names 7, expected 0 to 6, one of the 7 rows of features"),
        ("0,1797\n", r"pair 0 \(counted from 0\) names 1797, expected 0 to 1796, one of the 1797 nodes"),
        ("3,1,2\n", r"shape \[1, 3\], expected whole numbers \[M, 2\]"),
        ("0,1\na,b\n", "cannot be read"),
    ],
)
def test_bad_neighbors(rbm, run_folder, lines, message):
    np.save("x.npy", np.zeros((7, 64), dtype=np.float32))
    Path("n.csv").write_text(lines)
    status, _, err = rbm("predict", run_folder[0], "x.npy", "--neighbors", "n.csv")
    assert status == 2
    assert re.search(message, err)


def test_experiment_and_its_tables(rbm, tmp_path):
    """An experiment file is run, run again without work to do, and shown as tables."""
    (tmp_path / "e.yaml").write_text(
        "datasets: [digits]\nseeds: 0\nmethods: [rbm]\nvariants: {narrow: {rbm: {hidden_channels: 4}}, wide: {}}\n"
        "changes: {teacher: {max_epochs: 3}, rbm: {max_epochs: 3}, encoding: {deepwalk: false}}\n"
    )
    assert rbm("experiment", "e.yaml")[0] == 0
    rows = (tmp_path / "results" / "e.csv").read_text()
    assert len(rows.splitlines()) == 1 + 3
    status, out, _ = rbm("experiment", "e.yaml")
    assert (status, (tmp_path / "results" / "e.csv").read_text()) == (0, rows)
    assert "| digits narrow | transductive | 1 |" in out
    status, out, _ = rbm("table", "results/e.csv", "--variants", "--plot", "e.png")
    assert out.startswith("| | narrow | wide |")
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")
    assert "does not exist" in rbm("table", "no.csv")[2]
    assert rbm("table", "results/e.csv", "--variants", "--column", "val")[1] != out
    assert "expected one of test_at_best_val" in rbm("table", "results/e.csv", "--column", "best")[2]


@pytest.mark.parametrize("words", [("distill", "--seeds", "0"), ("experiment", "e.yaml")], ids=lambda words: words[0])
@pytest.mark.parametrize(("flags", "expected"), [((), "cuda"), (("--device", "cpu"), "cpu")])
def test_many_runs_use_the_gpu_or_the_given_device(rbm, tmp_path, monkeypatch, words, flags, expected):
    (tmp_path / "e.yaml").write_text("datasets: [digits]\nseeds: 0\n")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    devices = []

    def run_experiment(*_, device, **__):
        devices.append(device)
        raise ValueError("nothing is trained here")

    monkeypatch.setattr("rbm.experiments.runner.run_experiment", run_experiment)
    rbm(*words, *flags)
    assert devices == [expected]


def test_table_of_runs_without_rbm(rbm, tmp_path):
    figures = dict.fromkeys(ACCURACIES, "0.5") | {"dataset": "mine.npz", "setting": "inductive", "protocol": "rbm"}
    figures |= {"teacher": "sage", "preset": "clean", "seed": "0"}
    rows = [dict.fromkeys(COLUMNS, "") | figures | {"method": method} for method in ("teacher", "mlp", "glnn")]
    append_rows(tmp_path / "rows.csv", rows)
    status, out, _ = rbm("table", "rows.csv")
    assert status == 0
    assert "GLNN" in out
    assert out == rbm("table", "rows.csv", "--methods")[1]
    status, _, err = rbm("table", "rows.csv", "--variants")
    assert status == 2
    assert "results file rows.csv has no row of rbm" in err


def test_no_run_runs_nothing(rbm, tmp_path, monkeypatch):
    """Regression test: a study trained and replaced its page, and a missing file of rows gave an empty page."""
    monkeypatch.setattr("rbm.experiments.analysis.study", lambda *_, **__: pytest.fail("a study was begun"))
    for name in ("complexity", "main"):
        status, _, err = rbm("reproduce", name, "--no-run", "--out", "rows.csv")
        assert (status, "does not exist, so --no-run has nothing to show" in err) == (2, True)
    assert not (tmp_path / "rows").exists()
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "complexity.md").write_text("# Sizes\n")
    assert rbm("reproduce", "complexity", "--no-run", "--out", "rows.csv")[:2] == (0, "# Sizes\n")


def test_table_shows_all_that_it_is_asked_for(rbm, tmp_path):
    """Regression test: rows of a second protocol were left out; --plot and --column did nothing without --variants."""
    figures = dict.fromkeys(ACCURACIES, "0.5") | {"dataset": "cora", "setting": "inductive"}
    figures |= {"teacher": "sage", "preset": "clean", "seed": "0"}
    rows = [
        dict.fromkeys(COLUMNS, "") | figures | {"method": method, "protocol": protocol, "val": value}
        for protocol, value in (("rbm", "0.3"), ("cpf", "0.4"))
        for method in ("mlp", "rbm")
    ]
    append_rows(tmp_path / "rows.csv", rows)
    out = rbm("table", "rows.csv", "--methods", "--column", "val")[1]
    assert re.findall(r"Protocol (\w+):|\| (\*\*.*?) \|", out) == [
        *(("rbm", ""), ("", "**30.00**"), ("cpf", ""), ("", "**40.00**"))
    ], "without the paper's test accuracies"
    for option, message in (("--plot", "only variants are drawn; add --variants"), ("--column", "add --methods, --v")):
        status, _, err = rbm("table", "rows.csv", option, "val")
        assert (status, message in err) == (2, True)
    append_rows(tmp_path / "empty.csv", [])
    assert "results file empty.csv has no row yet" in rbm("table", "empty.csv")[2]


def test_distill_by_another_method(rbm, tmp_path):
    quick = ["--set", "teacher.max_epochs=3", "--set", "glnn.max_epochs=3", "--set", "glnn.hidden_channels=16"]
    status, out, _ = rbm("distill", "--method", "glnn", "--inflate", 2, *quick, "--out", "run")
    assert status == 0
    assert "GLNN" in out
    assert load_student(tmp_path / "run").layers[0].out_features == 32
    np.save("x.npy", np.zeros((3, 64), dtype=np.float32))
    assert rbm("predict", "run", "x.npy")[0] == 0


def test_distill_over_seeds(rbm, tmp_path):
    quick = [*QUICK, "--set", "encoding.deepwalk=false"]
    status, out, _ = rbm("distill", *quick, "--seeds", "0-1", "--setting", "inductive")
    assert status == 0
    assert out.startswith("digits, inductive, sage teacher, mean ± standard deviation over 2 seeds\n\n| | Test | Val |")
    assert "\nBest student at validation: " in out
    assert len((tmp_path / "runs" / "digits-inductive-clean.csv").read_text().splitlines()) == 1 + 2 * 3


def test_info(rbm):
    status, out, _ = rbm("info")
    assert status == 0
    for text in (
        "cxx_compiler",
        "torch",
        "triton",
        "torch-geometric",
        "librbm_cpu",
        "memory_update_",
        "C++ (librbm_cpu)",
    ):
        assert text in out
    for operator in ("pack_experts", "routed_matmul_packed"):
        assert operator in out


def test_configuration_file_and_options(rbm, tmp_path):
    (tmp_path / "own.yaml").write_text("seed: 5\nrbm:\n  num_experts: 5\n  top_k: 2\n")
    arguments = ["distill", "--config", "own.yaml", *QUICK, "--set", "rbm.top_k=4", "--no-plots", "--out", "run"]
    assert rbm(*arguments)[0] == 0
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "num_experts: 5" in config
    assert "top_k: 4" in config
    assert "seed: 5" in config


def test_precision(rbm, tmp_path):
    quick = [*QUICK, "--set", "encoding.deepwalk=false", "--no-plots", "--precision", "bfloat16"]
    assert rbm("distill", *quick, "--out", "run")[0] == 0
    assert "precision: bfloat16" in (tmp_path / "run" / "config.yaml").read_text()
    assert rbm("distill", "--resume", "--no-plots", "--out", "run")[0] == 0
    status, _, err = rbm("distill", "--resume", "--precision", "float32", "--out", "run")
    assert status == 2
    assert "precision (was bfloat16, now float32)" in err
    status, _, err = rbm("distill", "--precision", "float16", "--out", "other")
    assert status == 2
    assert "precision is 'float16', expected float32 or bfloat16" in err


def test_precision_of_several_seeds(rbm, tmp_path):
    quick = [*QUICK, "--set", "encoding.deepwalk=false", "--method", "mlp", "--seeds", "0"]
    for precision in ("float32", "bfloat16"):
        assert rbm("distill", *quick, "--precision", precision, "--out", f"{precision}.csv")[0] == 0
    mixed, plain = ((tmp_path / f"{name}.csv").read_text() for name in ("bfloat16", "float32"))
    fingerprints = [{line.split(",")[16] for line in text.splitlines()[1:]} for text in (mixed, plain)]
    assert fingerprints[0]
    assert not fingerprints[0] & fingerprints[1]


def test_resume_without_options_takes_what_the_run_was_started_with(rbm, run_folder):
    folder, _ = run_folder
    before = (folder / "summary.json").read_bytes()
    status, _, err = rbm("distill", "--out", folder, "--resume", "--no-plots")
    assert status == 0
    assert "rbm: finished before, taken from" in err
    assert (folder / "summary.json").read_bytes() == before


def test_existing_run_folder(rbm, run_folder):
    folder, _ = run_folder
    status, _, err = rbm("distill", *QUICK, "--out", folder)
    assert status == 2
    assert "use --resume to continue it, --overwrite to replace it" in err


def test_resume_with_other_settings(rbm, run_folder):
    folder, _ = run_folder
    status, _, err = rbm("distill", *QUICK, "--seed", 3, "--out", folder, "--resume")
    assert status == 2
    assert "was started with another configuration: seed (was 0, now 3)" in err


def test_resume_tells_the_settings_that_differ_and_no_others(rbm, run_folder):
    status, _, err = rbm("distill", "--out", run_folder[0], "--resume", "--set", "rbm.lr=0.5")
    assert status == 2
    assert re.search(r"another configuration: rbm\.lr \(was [\d.]+, now 0\.5\); give them as they were", err)


BAD_FEATURES = {
    "missing": (None, "x.npy does not exist"),
    "width": (
        np.zeros((3, 5)),
        r"shape \[3, 5\], expected \[\*, 128\].*64 features and 64 encodings; or",
    ),
    "vector": (np.zeros(64), r"shape \[64\], expected"),
    "NaN": (np.full((3, 128), np.nan), r"row 0 holds NaN or infinity \(3 such rows from 0 to 2\)"),
    "pickled": (np.array([{"a": 1}], dtype=object), "cannot be read"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FEATURES.values(), ids=BAD_FEATURES.keys())
def test_bad_features(rbm, run_folder, tmp_path, content, message):
    if content is not None:
        np.save("x.npy", content)
    status, _, err = rbm("predict", run_folder[0], "x.npy")
    assert status == 2
    assert re.search(message, err), err
    assert not (tmp_path / "predictions.csv").exists()


def test_bad_predictions_file(rbm, run_folder):
    np.save("x.npy", np.zeros((3, 64), dtype=np.float32))
    status, _, err = rbm("predict", run_folder[0], "x.npy", "--out", "p.xlsx")
    assert status == 2
    assert "predictions file p.xlsx ends in '.xlsx', expected one of .csv, .npy, .parquet" in err


def test_a_run_is_used_from_any_folder(rbm, small_graph, tmp_path, monkeypatch):
    (tmp_path / "graphs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    torch.save(small_graph, tmp_path / "graphs" / "mine.pt")
    status, _, err = rbm("distill", "--dataset", "graphs/mine.pt", *QUICK, "--no-plots", "--out", "run")
    assert status == 0, err
    monkeypatch.chdir(tmp_path / "elsewhere")
    status, out, err = rbm("latency", "../run", "--repeats", "2", "--batch-sizes", "1")
    assert status == 0, err
    assert "Latency: mine, 60 nodes" in out
    assert rbm("distill", "--resume", "--out", "../run", "--no-plots")[0] == 0
    same = ("distill", "--dataset", "../graphs/mine.pt", *QUICK, "--resume", "--out", "../run", "--no-plots")
    assert rbm(*same)[0] == 0


def test_a_run_of_an_earlier_version_keeps_its_relative_path(rbm, small_graph, tmp_path, monkeypatch):
    torch.save(small_graph, "mine.pt")
    assert rbm("distill", "--dataset", "mine.pt", *QUICK, "--no-plots", "--out", "run")[0] == 0
    stored = tmp_path / "run" / "config.yaml"
    text = stored.read_text()
    assert f"dataset: {tmp_path}/mine.pt" in text
    stored.write_text(text.replace(f"{tmp_path}/mine.pt", "mine.pt"))
    assert rbm("distill", "--resume", "--out", "run", "--no-plots")[0] == 0
    assert "dataset: mine.pt" in stored.read_text()


def test_a_graph_becomes_undirected(rbm, small_graph, tmp_path):
    """And stays so for the commands that read it again, and over several seeds."""
    data, once = small_graph, small_graph.edge_index[0] < small_graph.edge_index[1]
    data.edge_index = data.edge_index[:, once]
    torch.save(data, tmp_path / "once.pt")
    quick = ("--dataset", "once.pt", *QUICK, "--set", "encoding.deepwalk=false", "--method", "mlp")
    assert rbm("distill", *quick, "--undirected", "--out", "both", "--no-plots")[0] == 0
    summary = json.loads(Path("both/summary.json").read_text())
    assert summary["edges"] == 2 * data.num_edges
    assert rbm("report", "both")[0] == 0
    status, _, err = rbm("distill", "--resume", "--out", "both", "--no-plots", "--method", "mlp")
    assert (status, "differ" in err) == (0, False)
    for name, flags in (("both", ["--undirected"]), ("once", [])):
        assert rbm("distill", *quick, *flags, "--seeds", "0", "--out", f"{name}.csv")[0] == 0
    (both, once) = (read_csv(Path(f"{name}.csv")) for name in ("both", "once"))
    assert float(both[0]["test_at_best_val"]) == pytest.approx(summary["teacher"]["test_accuracy"], abs=1e-5)
    assert both[0]["config"] != once[0]["config"]
    with pytest.raises(ValueError, match="undirected is for graphs that rbm reads from files"):
        distill(data, config=Config(undirected=True))
