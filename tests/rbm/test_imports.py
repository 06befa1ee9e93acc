"""The modules of ``rbm`` import in one direction, including imports inside functions and for types only."""

import ast
import importlib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rbm

PACKAGE = Path(rbm.__file__).parent
# A folder of rbm/ imports only from folders with smaller numbers.
LEVELS = {
    "utils": 0,
    "config": 1,
    "nn": 1,
    "datasets": 2,
    "training": 3,
    "teachers": 4,
    "distillation": 5,
    "serving": 6,
    "experiments": 6,
    "cli": 7,
}
# Former names of modules, kept for one version.
ALIASES = {"layer", "students", "hub", "methods", "lessons", "splits", "baselines"}


def modules(package: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name."""
    names = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(package: Path) -> dict[str, set[str]]:
    """For each module of a package, the package's modules that it imports, at any place in its code."""
    known = modules(package)
    found = {}
    for name, path in known.items():
        named = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    member = f"{node.module}.{alias.name}"
                    named.add(member if member in known else node.module)
        found[name] = (named & known.keys()) - {name}
    return found


def test_no_circle():
    # prepare() raises CycleError, which names the modules of a cycle.
    TopologicalSorter(imports(PACKAGE)).prepare()


def test_folders_import_downwards():
    wrong = []
    for name, named in imports(PACKAGE).items():
        folder = name.split(".")[1] if "." in name else ""
        for other in named:
            target = other.split(".")[1] if "." in other else ""
            down = folder == target or (folder in LEVELS and target in LEVELS and LEVELS[target] < LEVELS[folder])
            if not down and folder in LEVELS:
                wrong.append(f"{name} imports {other}")
    assert not wrong


def test_nothing_else_stands_at_the_top():
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found == {"__init__", "__main__", *LEVELS, *ALIASES}


def test_every_module_can_be_imported():
    for name in modules(PACKAGE):  # rbm.__main__ too, as pkgutil.walk_packages and documentation tools do
        importlib.import_module(name)


def test_a_circle_is_found(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import package.two\n")
    (package / "two.py").write_text("def call():\n    from package import one\n")
    assert imports(package)["package.two"] == {"package.one"}
    with pytest.raises(CycleError):
        TopologicalSorter(imports(package)).prepare()
