"""The readers' messages for files, read in this process or in one that a segmentation fault may end."""

import json
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

WIDTH = 6  # number of features
_MEMORY = 6 * 2**30


def refusal(path: Path) -> str:
    """The message with which a graph (``.pt``, ``graph.npz``, a folder) or features are refused, else ``"taken"``."""
    from rbm.datasets import load_graph, validate_data
    from rbm.nn.sparse_rows import to_dense
    from rbm.serving.feature_files import open_features

    try:
        if path.is_dir() or path.suffix == ".pt" or path.name == "graph.npz":
            validate_data(load_graph(path))
        else:
            torch.cat([to_dense(rows) for rows in open_features(path, WIDTH).pieces()])
    except (ValueError, TypeError) as error:
        return str(error)
    return "taken"


def refusals_in_subprocess(paths: Iterable[Path]) -> dict[str, str]:
    """:func:`refusal` for each file by its name, from a process with a limit of 6 GiB."""
    command = [sys.executable, __file__, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    answers = {}
    for name in sys.argv[1:]:
        print(name, file=sys.stderr, flush=True)
        answers[Path(name).name] = refusal(Path(name))
    print(json.dumps(answers))
