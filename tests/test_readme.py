"""What the README shows, runs."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_python_block(block):
    exec(compile(block, str(README), "exec"), {})


def test_there_is_an_example_for_each_of_the_three_users():
    assert len(BLOCKS) == 3


def test_map_names_what_exists():
    tree = README.read_text().split("## Map of the tree")[1]
    named = re.findall(r"\b(\w+\.py|\w+/)(?=\s)", tree)
    assert len(named) > 10
    for name in named:
        assert list(README.parent.rglob(name.rstrip("/"))), f"{name} is on the map and not in the tree"
