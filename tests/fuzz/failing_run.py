"""A small run with a failing disk in a separate process: ``python failing_run.py FOLDER [AT ERRNO SHORT]...``.

Prints one line of JSON per case (and first for a run without a failure): the number of writes, how it ended, its files,
and whether the resumed run had the same result. Each case is a fork, so that everything is imported once.
"""

import ctypes
import errno
import hashlib
import json
import os
import shutil
import sys
import traceback
from pathlib import Path

import small_graph
import torch
from torch_geometric.data import Data

from rbm.cli.errors import EXPECTED
from rbm.config import Config
from rbm.distillation.distill import distill

DATA = Data(**small_graph.tensors())
CONFIG = Config().updated(
    {
        **{name: {"max_epochs": 3} for name in ("teacher", "mlp")},
        "rbm": {"max_epochs": 3, "pretrain_epochs": 1, "hidden_channels": 16},
        "encoding": {"deepwalk": False},
    }
)
SAME = ("config.yaml", "summary.json", "rbm.safetensors", "mlp.safetensors", "teacher.safetensors", "student.json")


def run(folder: Path, **options) -> None:
    distill(DATA, config=CONFIG, folder=folder / "run", cache=folder / "cache", measure_latency=False, **options)


def digests(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / "run" / name).read_bytes()).hexdigest() for name in SAME}


def case(folder: Path, at: int, error: int, short: int) -> dict:
    library = ctypes.CDLL(None)
    folder.mkdir(parents=True)
    library.fail_writes(str(folder).encode(), at, error, short)
    found = {"at": at, "error": errno.errorcode.get(error), "short": short}
    try:
        run(folder)
        found["ended"] = "whole"
    except EXPECTED as told:
        found["ended"], found["said"] = type(told).__name__, str(told)
    except BaseException:
        found["ended"], found["said"] = "traceback", traceback.format_exc()[-2000:]
    found["writes"] = library.counted_writes()
    library.fail_writes(str(folder).encode(), 0, 0, 0)  # there is space again
    found["left"] = [path.name for path in folder.rglob(".*.partial")]
    if found["ended"] != "whole":
        begun = (folder / "run" / "config.yaml").is_file()
        run(folder, **({"resume": True} if begun else {"overwrite": (folder / "run" / "run.json").is_file()}))
    found["files"] = digests(folder)
    return found


def main() -> None:
    torch.set_num_threads(1)
    folder, numbers = Path(sys.argv[1]), [int(number) for number in sys.argv[2:]]
    cases = [(0, 0, 0), *zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)]
    for number, given in enumerate(cases):
        child = os.fork()
        if child == 0:
            print(json.dumps(case(folder / str(number), *given)), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        shutil.rmtree(folder / str(number), ignore_errors=True)
        if status:
            print(
                json.dumps({"at": given[0], "error": errno.errorcode.get(given[1]), "ended": f"status {status}"}),
                flush=True,
            )


if __name__ == "__main__":
    main()
