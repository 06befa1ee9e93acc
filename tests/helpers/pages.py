"""The pages of the documentation, with their code blocks and the commands of ``rbm`` on them."""

import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from rbm.cli import main

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("benchmarks", "benchmarks/notes", "csrc", "experiments", "results", "tests")
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *(p for f in FOLDERS for p in (ROOT / f).glob("*.md"))]
}
# Options that make a command quick. After so few epochs, the kept student would be the MLP on labels.
_FEW = [f"--set={section}.max_epochs=2" for section in ("teacher", "mlp", "rbm")]
_QUICK = {
    "distill": ["--no-plots", "--keep=mlp", *_FEW, "--set=rbm.pretrain_epochs=2", "--set=encoding.walks_per_node=1"],
    "latency": ["--repeats=1"],
}


def blocks(text: str, languages: str) -> list[tuple[int, str, str]]:
    """Code blocks of a language, or of several (``python|sh``): the line on which each begins, language and code."""
    found = re.finditer(rf"(?ms)^```({languages})\n(.*?)^```", text)
    return [(text[: block.start(2)].count("\n"), block[1], block[2]) for block in found]


def commands_of(block: str) -> Iterator[list[str]]:
    """The commands of a shell block that begin with ``rbm`` or ``python``, each as a list of words."""
    for line in block.replace("\\\n", " ").splitlines():
        tokens = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        tokens.whitespace_split = True
        for between, command in itertools.groupby(tokens, key=lambda token: set(token) <= set("&|;")):
            program, *words = command
            if not between and Path(program).name in ("rbm", "python"):
                yield [Path(program).name, *words]


def commands(text: str) -> Iterator[list[str]]:
    """The words after ``rbm`` in the commands of a page, in shell blocks and in sentences."""
    for _, _, block in blocks(text, "sh"):
        yield from (words for program, *words in commands_of(block) if program == "rbm")
    prose = re.sub(r"(?ms)^```.*?^```", "", text)
    for sentence in re.findall(r"`rbm ([^`]+)`", prose):
        words = shlex.split(sentence)
        if len(words) > 1:  # a single word names a command without showing how to call it
            yield words


def may_run(command: list[str]) -> bool:
    """Whether a command is one of ``rbm``, or of Python with its code, and names no placeholder, such as PATH, and no
    run that does not exist.
    """
    if command[0] == "python" and command[1] != "-c":
        return False
    return not any(word.isupper() or (word.startswith("runs/") and not Path(word).is_dir()) for word in command)


def run_quickly(program: str, *words: str) -> None:
    """Run a command in this process, with few epochs or calls; it must succeed."""
    if program == "python":
        exec(words[1], {})
        return
    arguments = mock.patch.object(sys, "argv", ["rbm", *words, *_QUICK.get(words[0], [])])
    with arguments, pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code, words
