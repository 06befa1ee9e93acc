"""Runs random command lines of ``rbm`` one after the other, in a process that may be killed by one.

A line ``seed`` on standard input makes a case; a line of JSON on standard output tells its outcome. By itself it
replays one case: ``python tests/fuzz/command_cases.py SEED``.

Options, their types and their choices are read from the command line itself. Values are valid, or taken from a pool of
values that no one should pass. Expensive work is stopped where it begins: a case that gets there counts as taken.
"""

import contextlib
import importlib
import io
import json
import os
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import typer

MEMORY = 16 * 2**30
SECONDS = 60  # a library that is imported for the first time takes some, on a busy machine
NUMBERS = ("0", "-1", "1", "2", "3", "8", "100", "65536", "2147483648", "99999999999", "9" * 23, "1.5", "nan", "inf")
HOSTILE = (
    *("", " ", "0", "-1", "1", "3", "1e11", "99999999999", "99999999999999999999999", "0x10", "1.5", "nan", "inf"),
    *("None", "true", "[]", "{}", "[1", "é\u202e", "\udcff", "x" * 5000, "a,b", ",", ",,", "0-99999999999", "5-2"),
    *("0,0", "-", "--", "..", ".", "/", "/dev/null", "/dev/full", "/proc/self/mem", "/proc/1/x", "~", "~nosuchuser/x"),
    *("nowhere", "nowhere/x.npy", "meta", "cuda:99", "cpu", "rbm", "mlp", "glnn,rbm", "mlp,mlp", "sage", "logits"),
    *("digits", "inductive", "paper", "official", "val", "main", "complexity", "onnx", "aoti", "http://x/y", "$HOME"),
    *("x.npy", "x.npz", "x.csv", "graph.npz", "run", "run/config.yaml", "run/student.json", "own.yaml", "e.yaml"),
    *("table.csv", "space.yaml", "plugin.py", "broken.py", "latin.yaml", "out", "out.csv", "out.npy", "out.pt2"),
)
SETTINGS = (
    *("rbm.lr=0.1", "rbm.lr=[1", "rbm.lr=!!python/name:os.system", "rbm.lr=", "=3", "rbm=3", "rbm.lr.x=1", "a.b.c=1"),
    *("rbm.num_layers=10000000", "mlp.hidden_channels=1e99", "rbm.num_experts=999999999999", "seed=-1", "inflate=1e9"),
    *(
        "teacher.max_epochs=1",
        "teacher=sage",
        "dataset=",
        "root=~nosuchuser",
        "rbm.lr=&a [*a]",
        "rbm..lr=1",
        "x" * 9999,
    ),
    *("encoding.deepwalk=maybe", "distill.temperature=.nan", "rbm.top_k=0", "preset=[1]", "rbm.lr={}", "\udcff=1"),
)


class ReachedError(ValueError):
    """The work would begin here."""


class HangError(BaseException):
    """A case took longer than SECONDS."""


def _stop(*_) -> None:
    raise HangError


def _reached(*_, **__) -> None:
    raise ReachedError("reached")


def _cut_off_work() -> None:
    for place, name in (
        ("rbm.distillation.distill", "_train"),
        ("rbm.utils.parallel", "ProcessPoolExecutor"),  # its workers would not know of this
        ("rbm.serving.export", "trace"),
        ("rbm.serving.latency", "milliseconds"),
        ("rbm.serving.server.run", "run_forever"),
        ("rbm.serving.server", "run_forever"),
    ):
        module = importlib.import_module(place)
        if hasattr(module, name):
            setattr(module, name, _reached)


def make_files(folder: Path) -> None:
    """The files named in the pool: a finished run, features, tables and configurations, valid and broken."""
    import rbm

    quick = {name: {"max_epochs": 1} for name in ("teacher", "rbm")}
    config = rbm.preset_config("clean", "digits").updated(
        {**quick, "rbm": {"max_epochs": 1, "hidden_channels": 8}, "encoding": {"deepwalk": False}}
    )
    data = rbm.load_dataset("digits")
    rbm.distill(data, config=config, methods=["rbm"], folder=folder / "run", measure_latency=False)
    np.save(folder / "x.npy", np.zeros((3, 64), dtype=np.float32))
    np.savez(folder / "x.npz", x=np.zeros((3, 64), dtype=np.float32))
    np.savetxt(folder / "x.csv", np.zeros((3, 64)), delimiter=",")
    texts = {
        "own.yaml": "seed: 1\n",
        "e.yaml": "methods: [mlp]\n",
        "space.yaml": "rbm.lr: [0.01, 0.001]\n",
        "table.csv": "a,b\n1,2\n",
        "plugin.py": "",
        "broken.py": "1 / 0\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin.yaml").write_bytes(b"seed: \xe9\n")


def draw(random: Random) -> list[str]:
    """A command line."""
    from rbm.cli import app

    group = typer.main.get_command(app)
    words = ["--plugin", random.choice(["plugin.py", *HOSTILE])] if random.random() < 0.05 else []
    name = random.choice(sorted(group.commands))
    words.append(name)
    for parameter in group.commands[name].params:
        if parameter.opts[0].startswith("-"):
            if random.random() < 0.25 and "--help" not in parameter.opts:
                words.append(random.choice([*parameter.opts, *parameter.secondary_opts]))
                if not getattr(parameter, "is_flag", False):
                    words.append(random.choice(_pool(parameter, random)))
        elif random.random() < 0.95:
            words.append(_argument(name, parameter.name, random))
    return words


def _pool(parameter: Any, random: Random) -> tuple[str, ...]:
    if "--set" in parameter.opts:
        return SETTINGS
    about = str(vars(parameter))  # versions of Typer keep the type in different places
    is_number = any(kind in about for kind in ("<class 'int'>", "<class 'float'>", "INT", "FLOAT", "IntRange"))
    return NUMBERS if is_number and random.random() < 0.9 else HOSTILE


def _argument(command: str, name: str, random: Random) -> str:
    """An argument, mostly valid, so that the options are read."""
    fits = {"run": "run", "features": "x.npy", "file": "e.yaml" if command == "experiment" else "table.csv"}
    return fits.get(name, "main") if random.random() < 0.8 else random.choice(HOSTILE)


def run(seed: int, pristine: Path) -> dict[str, str]:
    """The outcome of a case: ``"taken"``, ``"refused"``, or ``"fault"``."""
    from rbm.cli import main, options

    words = draw(Random(seed))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(pristine, folder, dirs_exist_ok=True)
        os.chdir(folder)
        out, err = io.StringIO(), io.StringIO()
        options.console.file, options.status.file = out, err
        sys.argv = ["rbm", *words]
        signal.alarm(SECONDS)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        except BaseException:
            status = traceback.format_exc()
        finally:
            signal.alarm(0)
            os.chdir("/")
    shown = f"rbm {shlex.join(words)}"[:1500].encode("utf-8", "replace").decode()
    said = err.getvalue().strip().encode("utf-8", "replace").decode()
    if status not in (0, 2) or "Traceback" in said or (status == 2 and not said):
        return {"outcome": "fault", "why": f"{shown}\n{status}\n{said[-1500:]}"}
    return {"outcome": "taken" if status == 0 or said.endswith("reached") else "refused", "why": f"{shown}\n{said}"}


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder))
        _cut_off_work()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.signal(signal.SIGALRM, _stop)
        for seed in sys.argv[1:]:
            answer = run(int(seed), Path(folder))
            print(f"{answer['outcome']}: {answer['why']}")
        if len(sys.argv) == 1:
            channel = os.fdopen(os.dup(1), "w")  # standard output is a case's own
            for line in sys.stdin:
                print(json.dumps(run(int(line), Path(folder))), file=channel, flush=True)


if __name__ == "__main__":
    main()
