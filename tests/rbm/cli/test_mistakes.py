"""Mistakes on the command line: one sentence, exit status 2, nothing written."""

import re

import pytest


@pytest.fixture
def rbm(command, monkeypatch, tmp_path):
    """Run a command in a fresh folder."""
    monkeypatch.chdir(tmp_path)
    return command


MISTAKES = {
    "unknown dataset": (["distill", "--dataset", "coraa"], "expected one of digits, cora.*did you mean 'cora'"),
    "no root": (["distill", "--dataset", "cora"], "root"),
    "missing root": (["distill", "--dataset", "cora", "--root", "nowhere"], "nowhere"),
    "top_k": (["distill", "--set", "rbm.top_k=9"], "rbm.top_k is 9, expected between 1 and num_experts=8"),
    "unknown setting": (
        ["distill", "--set", "rbm.tpo_k=3"],
        "unknown setting rbm.tpo_k; known here.*; did you mean 'rbm.top_k'",
    ),
    "setting by another name": (
        ["distill", "--set", "rbm.learning_rate=0.1"],
        "unknown setting rbm.learning_rate; known here.*; did you mean 'rbm.lr'",
    ),
    "unknown section": (["distill", "--set", "rmb.lr=0.01"], "unknown setting rmb; known here.*; did you mean 'rbm'"),
    "no section": (
        ["distill", "--set", "top_k=2"],
        r"unknown setting top_k; .*; did you mean one of rbm.top_k, moe.top_k\?",
    ),
    "experts": (["distill", "--set", "rbm.num_experts=2000"], "2000 but the observed graph has 1797 nodes"),
    "preset": (["distill", "--preset", "paper"], "no hyperparameters for dataset 'digits'"),
    "teacher": (["distill", "--teacher", "graphsage"], "got 'graphsage', expected one of sage,.*did you mean 'sage'"),
    "method": (["distill", "--method", "gnn"], r"methods is \['gnn'\], expected one or more of mlp, rbm, moe"),
    "misspelt method": (["distill", "--method", "mlp,rmb"], "each once; did you mean 'rbm'"),
    "device": (["distill", "--device", "tpu"], "device is 'tpu', expected cpu, cuda, or cuda:0 and so on"),
    "meta device": (["distill", "--device", "meta"], "device is 'meta', expected cpu"),
    "device of several seeds": (["distill", "--seeds", "0", "--device", "tpu"], "device is 'tpu', expected cpu"),
    "no such GPU": (["distill", "--device", "cuda:99"], "device is 'cuda:99', which is not usable here"),
    "config file": (["distill", "--config", "no.yaml"], "configuration file no.yaml does not exist"),
    "config text": (["distill", "--config", __file__], "is not valid YAML|holds str, expected the sections"),
    "resume nothing": (["distill", "--out", "nothing", "--resume"], "there is no run to resume"),
    "predict nothing": (
        ["predict", "nothing", "x.npy"],
        "nothing does not exist; expected the run folder of a finished",
    ),
    "report nothing": (["report", "nothing"], "nothing does not exist; expected the run folder of a finished"),
    "report no run": (["report", "nothing", "--out", "page.html"], "nothing does not exist; expected the run folder"),
    "out is a file": (["distill", "--out", "broken.py", "--overwrite"], "run folder broken.py is a file"),
    "resume and overwrite": (
        ["distill", "--resume", "--overwrite", "--out", "x"],
        "has no config.yaml|expected one of",
    ),
    "cache is a file": (["distill", "--cache", "broken.py"], "cache is broken.py, which is a file; expected a folder"),
    "rows into a folder": (["distill", "--seeds", "0", "--out", ".."], "results file .. is a folder"),
    "too many seeds": (["distill", "--seeds", "0-99999999999"], "seeds is '0-99999999999', expected numbers below"),
    "many seeds": (["tune", "--seeds", "0-999999999"], "names 1,000,000,000 seeds.*expected 1 to 10,000"),
    "overwriting several seeds": (
        ["distill", "--seeds", "0", "--overwrite"],
        "--overwrite is about a run folder, and --seeds leaves none; without it, --seeds continues its CSV file",
    ),
    "resuming several seeds": (["distill", "--seeds", "0", "--resume"], "--resume is about a run folder, and --seeds"),
    "plots of several seeds": (["distill", "--seeds", "0", "--plots"], "--plots is about a run folder, and --seeds"),
    "seed and seeds": (["distill", "--seed", "3", "--seeds", "0-1"], "--seed 3 and --seeds 0-1 are both given"),
    "jobs of one seed": (["distill", "--jobs", "2"], "--jobs 2 runs several --seeds side by side, and none are given"),
    "seeds backwards": (["distill", "--seeds", "5-2"], "names 0 seeds"),
    "no jobs": (
        ["distill", "--seeds", "0", "--jobs", "0"],
        "'--jobs'.*(equal to 1|not in the range)",
    ),
    "broken YAML": (["distill", "--set", "rbm.lr=[1"], r"'rbm.lr=\[1' has a value that is not valid YAML"),
    "YAML tag": (["distill", "--set", "rbm.lr=!!python/name:os.system"], "has a value that is not valid YAML"),
    "section and value": (["distill", "--set", "rbm=4", "--set", "rbm.lr=3"], "rbm.lr is set, and rbm to 4 as a whole"),
    "variants": (
        ["experiment", "variants.yaml"],
        r"variants.yaml: variants is \[1\], expected sections with",
    ),
    "changes": (["experiment", "changes.yaml"], "changes.yaml: changes is 5, expected sections with settings"),
    "variant": (
        ["experiment", "variant.yaml"],
        "variant.yaml: variants is .*, expected sections with",
    ),
    "fractional seed": (["experiment", "seeds.yaml"], "seeds is 1.5, expected numbers"),
    "no datasets": (["experiment", "datasets.yaml"], r"datasets is \(\), expected a list of names, not empty"),
    "methods as text": (["experiment", "methods.yaml"], "methods is 'rbm', expected a list"),
    "column": (["reproduce", "main", "--methods", "x", "--no-run"], "methods holds 'x', expected some of cohop, glnn"),
    "methods of a study": (["reproduce", "complexity", "--methods", "x"], "expected none: the study complexity"),
    "device unused": (["reproduce", "main", "--no-run", "--device", "x"], "device is 'x', expected cpu"),
    "no such user": (["distill", "--dataset", "~nosuchuser/x"], "dataset is ~nosuchuser/x, but no such user is known"),
    "no such user's root": (
        ["distill", "--dataset", "cora", "--root", "~nosuchuser"],
        "root is ~nosuchuser, but no such user is known here",
    ),
    "endless body": (["serve", "nothing", "--max-body", "inf"], "max-body: got inf, expected a finite number of MiB"),
    "body of NaN": (["serve", "nothing", "--max-body", "nan"], "max-body: got nan, expected a finite number of MiB"),
    "plugin raises": (["--plugin", "broken.py", "info"], r"plugin .*broken.py failed in line 2: RuntimeError: boom"),
    "plugin ends": (["--plugin", "ends.py", "info"], r"plugin .*ends.py failed in line 1: SystemExit: 3"),
    "plugin is no Python": (["--plugin", "syntax.py", "info"], "failed in line 1: SyntaxError"),
    **{
        f"empty {option}": (["distill", f"--{option}", ""], f"--{option} is empty; give it a value, or leave it out")
        for option in ("dataset", "teacher", "preset", "setting", "root", "method", "device", "seeds")
    },
}

FILES = {
    "variants.yaml": "variants: [1]",
    "variant.yaml": "variants: {narrow: 3}",
    "changes.yaml": "changes: 5",
    "seeds.yaml": "seeds: 1.5",
    "datasets.yaml": "datasets: []",
    "methods.yaml": "methods: rbm",
    "broken.py": "# a plugin\nraise RuntimeError('boom')",
    "ends.py": "import sys; sys.exit(3)",
    "syntax.py": "def broken(:",
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_ends_in_one_sentence_and_leaves_nothing(rbm, tmp_path, arguments, message):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    status, out, err = rbm(*arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("Error: ") or "╭─ Error" in err, "ours, or that of the library that reads options"
    assert "Traceback" not in err
    assert re.search(message, err), err
    assert not any((tmp_path / "runs").glob("*/*.safetensors"))
    # Python may cache the compiled plugin.
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == set(FILES)


def test_a_library_that_breaks_is_no_mistake_of_the_user(rbm, monkeypatch):
    """Unexpected errors keep their traceback, which a bug report needs."""
    monkeypatch.setattr("rbm.experiments.results.read_rows", lambda path: [][0])
    with pytest.raises(IndexError):
        rbm("table", __file__)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[..] DefaultCPUAllocator: can't allocate memory: ..")])
def test_out_of_memory(rbm, monkeypatch, error):
    def read_rows(path):
        raise error

    monkeypatch.setattr("rbm.experiments.results.read_rows", read_rows)
    status, _, err = rbm("table", __file__)
    assert status == 2
    assert err.startswith("Error: out of memory; a smaller graph, batch or student")


def test_a_home_in_quotes_is_written_out(rbm, monkeypatch, tmp_path):
    """Shells do not expand ~ in quotes or after an equals sign."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "run").mkdir(parents=True)
    home = str(tmp_path / "home")
    assert f"report {home}/page.pdf ends in '.pdf'" in rbm("report", "~/run", "--out", "~/page.pdf")[2]
    assert f"{home}/run holds no student.json" in rbm("report", "~/run")[2]
    assert f"{home}/rows.csv" in rbm("table", "~/rows.csv")[2]
    assert "out is ~nosuchuser/x, but no such user is known" in rbm("report", "~/run", "--out=~nosuchuser/x")[2]
    assert not (tmp_path / "~").exists()
