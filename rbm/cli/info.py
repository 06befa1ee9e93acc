"""``rbm info``: the build, the versions, the devices, and the implementation used for each operator."""

import platform
from collections.abc import Iterator

import torch
from rich.table import Table

from rbm.utils.environment import package_version
from rbm_kernels import _native
from rbm_kernels._dispatch import DEVICES, implementations

PACKAGES = ("torch", "triton", "torch-geometric", "numpy", "scikit-learn", "gensim", "safetensors")


def tables() -> Iterator[Table | str]:
    """Tables for the terminal in print order, and a sentence if no library was built."""
    yield _pairs("Build", {name: str(value) for name, value in _native.build_info().items()})
    versions = {name: package_version(name) for name in PACKAGES}
    yield _pairs("Versions", {"python": platform.python_version()} | versions)
    yield _pairs("Devices", devices())
    yield _pairs("Libraries", libraries())
    if _native.is_built_without_libraries():
        yield (
            "No compiled libraries: eager PyTorch serves every operator on a CPU, which is slower and gives the same"
            " results up to rounding. To get the libraries, install the wheel for Linux on x86-64, or run pip install ."
            " with a C++ compiler."
        )

    served = Table(title="Operators", title_justify="left")
    served.add_column("torch.ops.rbm")
    for device in DEVICES:
        served.add_column(device)
    for operator, by_device in implementations().items():
        served.add_row(operator, *by_device.values())
    yield served


def devices() -> dict[str, str]:
    """Descriptions of the available devices, by name."""
    threads = torch.get_num_threads()
    found = {"cpu": f"{platform.machine()}, {threads} {'thread' if threads == 1 else 'threads'}"}
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found[f"cuda:{index}"] = f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}"
    return found


def libraries() -> dict[str, str]:
    """For each library, whether it is loaded and if not, why."""
    return {
        f"librbm_{name}": "loaded" if entry["loaded"] else f"not loaded: {entry['reason']}"
        for name, entry in _native.status().items()
    }


def _pairs(title: str, pairs: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in pairs.items():
        table.add_row(name, value)
    return table
