"""The documentation: its Python code runs, its commands exist, its site builds, its map of the tree is correct.

Pages are README.md, CONTRIBUTING.md, all of docs/, and those of the folders beside it. The Python blocks of a page run
from top to bottom in one namespace and a folder of their own. Commands of ``rbm``, in shell blocks and in sentences,
are parsed, and those of some pages run between the blocks, with few epochs.
"""

import doctest
import html
import importlib
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
from browser import browser, programs
from pages import PAGES, ROOT, blocks, commands, commands_of, may_run, run_quickly

import rbm
import rbm_kernels
from rbm.cli import app
from rbm.config import RbMConfig, TokenizerConfig, as_text
from rbm.config.section import settings_of
from rbm.distillation.registry import METHODS

README = ROOT / "README.md"
# How many commands of a page run. All others name raw files or a run that the page does not make, or take longer.
RUN = {
    "docs/own-graph.md": 3,
    "docs/report.md": 2,
    "docs/scale.md": 1,
    "docs/sharing.md": 1,
    "docs/start.md": 5,
    "docs/verdict.md": 3,
}


@pytest.fixture
def _registries():
    """A page may add methods, teachers and datasets; hide them from other tests."""
    from rbm import datasets, teachers
    from rbm.distillation import registry as methods

    registries = (methods.METHODS, teachers.TEACHERS, datasets.DATASETS)
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.mark.usefixtures("_registries")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page == "docs/serving.md" else [])  # compiles a student
        for page, text in PAGES.items()
        if blocks(text, "python")
    ],
)
def test_python_runs(page, tmp_path, monkeypatch):
    """From top to bottom, and the commands of some pages between the blocks."""
    monkeypatch.chdir(tmp_path)
    namespace, number = {"__name__": "__page__"}, 0
    np.save("features.npy", rbm.load_dataset("digits").x.numpy())
    for line, language, block in blocks(PAGES[page], "python|sh" if page in RUN else "python"):
        if language == "python":
            exec(compile("\n" * line + block, ROOT / page, "exec"), namespace)
            continue
        for command in filter(may_run, commands_of(block)):
            run_quickly(*command)
            number += 1
    assert number == RUN.get(page, 0)


@pytest.mark.parametrize(
    "file", [str(file.relative_to(ROOT)) for file in ROOT.glob("rbm*/**/*.py") if ">>> " in file.read_text()]
)
def test_docstrings_show_what_comes_out(file):
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    failed, tried = doctest.testmod(module)
    assert (failed, tried > 0) == (0, True)


def parse(words):
    """Parse a command as ``rbm`` would, without running it; a command that does not fit raises."""
    command = typer.main.get_command(app)
    context = command.make_context("rbm", list(words))
    name, chosen, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    chosen.make_context(name, rest, parent=context)


@pytest.mark.parametrize(
    ("page", "words"), [(page, words) for page, text in PAGES.items() for words in commands(text)], ids=str
)
def test_command_has_its_options(page, words):
    try:
        parse(words)
    except Exception as error:
        # A sentence may name an option without its value.
        if "requires an argument" not in str(error):
            pytest.fail(f"{page} says: rbm {shlex.join(words)}, but: {error}")


def refused_preset(words):
    """Why ``rbm distill`` would refuse the preset of a command for its graph, or None."""
    from rbm.config.presets import preset_config
    from rbm.datasets import DATASETS
    from rbm.datasets.registry import find_dataset

    given = dict(itertools.pairwise(words))
    dataset = given.get("--dataset", "digits")
    if words[0] != "distill" or "--preset" not in words or Path(dataset).suffix or dataset not in DATASETS:
        return None
    try:
        preset_config(given["--preset"], find_dataset(dataset).name, setting=given.get("--setting", "transductive"))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("page", PAGES)
def test_presets_of_commands_exist_for_their_graphs(page):
    assert [words for words in commands(PAGES[page]) if refused_preset(words)] == []


def test_a_preset_without_settings_for_a_graph_would_be_seen():
    assert "no hyperparameters for dataset 'digits'" in refused_preset(["distill", "--preset", "paper"])
    assert refused_preset(["distill", "--dataset", "cora", "--preset", "paper"]) is None


def test_a_command_that_does_not_exist_would_be_seen():
    text = "```sh\ncd x && rbm distill --no-such-option # rbm\n```\n or `rbm undistill --all` ... `rbm info`"
    found = list(commands(text))
    assert found == [["distill", "--no-such-option"], ["undistill", "--all"]]
    for words in found:
        with pytest.raises(Exception, match="No such"):
            parse(words)


def test_readme_has_a_quick_start_and_an_example_of_each_use():
    assert len(blocks(README.read_text(), "python")) == 5


def test_readme_is_short_and_begins_with_both_commands():
    text = README.read_text()
    assert len(text.splitlines()) < 180
    assert len(text.split()) < 1800
    commands = [line for line in text.splitlines()[:45] if line.startswith("python3 -m venv")]
    assert ["rbm distill" in commands[0], "pytest" in commands[1]] == [True, True]
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert len(pictures) == 1
    assert (ROOT / pictures[0]).is_file()


@pytest.mark.parametrize(("page", "heading"), [("README.md", "## Layout"), ("CONTRIBUTING.md", "## Map of the tree")])
def test_map_names_what_exists(page, heading):
    tree = PAGES[page].split(heading)[1].split("\n## ")[0]
    named = re.findall(r"\b(\w+\.py|\w+/)(?=\s)", tree)
    assert len(named) > 10
    there = set()
    for _, folders, files in os.walk(ROOT):
        folders[:] = [
            name for name in folders if not name.startswith(".")
        ]  # the tree may contain a virtual environment
        there |= {*folders, *files}
    for name in named:
        assert name.rstrip("/") in there, f"{name} is on the map and not in the tree"


def anchors(text):
    """Names of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", text))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def lost_links(page, text):
    """Links of a page that lead to no file of the tree, or to no heading of a page."""
    for address in re.findall(r"\]\(([^():\s]+)\)", re.sub(r"(?ms)^```.*?^```", "", text)):
        path, _, heading = address.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (heading and target.suffix == ".md" and heading not in anchors(target.read_text())):
            yield address


def test_links_of_pages_lead_somewhere_in_the_tree():
    """As on GitHub; tests of the site check that they lead somewhere there too."""
    pages = PAGES | {str(file.relative_to(ROOT)): file.read_text() for file in ROOT.glob("rbm_kernels/**/README.md")}
    assert [(page, link) for page, text in pages.items() for link in lost_links(page, text)] == []
    lost = ["docs/no.md", "README.md#no", "operators/cosine_topk.md"]
    assert list(lost_links("a.md", "[a](README.md#results) " + "".join(f"[a]({link})" for link in lost))) == lost


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings_handlers", "latex2mathml"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    # Material for MkDocs prints an advertisement for its successor otherwise.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Tags(HTMLParser):
    """URLs that a browser would fetch for a page of the site, targets of its links, and names in it."""

    def __init__(self):
        super().__init__()
        self.fetched, self.links, self.names = [], [], set()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.names |= {attributes[key] for key in ("id", "name") if key in attributes}
        if tag in ("script", "img", "iframe"):
            self.fetched.append(attributes.get("src") or "")
        elif tag == "link" and attributes.get("rel") in ("stylesheet", "preload", "icon"):
            self.fetched.append(attributes["href"])
        elif tag in ("a", "link") and "href" in attributes:
            self.links.append(attributes["href"])


@pytest.fixture(scope="module")
def pages(site):
    """The tags of every page, by its file."""
    found = {path.resolve(): Tags() for path in site.rglob("*.html")}
    for path, tags in found.items():
        tags.feed(path.read_text())
    return found


def broken(site, pages):
    """Broken links within the site: the page and the address."""
    for page, tags in pages.items():
        for address in (*filter(None, tags.fetched), *tags.links):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            path = unquote(parts.path)
            # Without a site address, the error page may be served at any path, so its links begin at the root.
            target = site / path[1:] if path.startswith("/") else page.parent / path if path else page
            target = (target / "index.html" if target.is_dir() else target).resolve()
            if parts.fragment and target in pages:  # a picture's fragment names its colour scheme
                found = unquote(parts.fragment) in pages[target].names
            else:
                found = target.is_file()
            if not found:
                yield str(page.relative_to(site.resolve())), address


def test_site_is_whole_and_fetches_nothing(site, pages):
    for page in ("concepts.html", "operators/memory_update.html", "api/layer.html", "contributing.html"):
        assert (site / page).is_file()
    for path, tags in pages.items():
        assert tags.fetched
        assert not [address for address in tags.fetched if "//" in address], path


def test_every_link_leads_somewhere(site, pages):
    assert sum(len(tags.links) for tags in pages.values()) > 1000
    assert list(broken(site, pages)) == []
    lost = Tags()
    lost.feed(
        '<a href="no.html"></a><a href="#no"></a><img src="no.png"><a href="index.html#no"></a><a href="#x" id=x>'
    )
    assert len(list(broken(site, {**pages, (site / "lost.html").resolve(): lost}))) == 4


def test_the_site_links_its_own_pages_and_names_other_files(site):
    named = set()
    for page in site.rglob("*.html"):
        named |= set(re.findall(r"\(<code>([\w./-]+\.md)(?:#[\w-]+)?</code>\)", page.read_text()))
    assert "benchmarks/README.md" in named
    elsewhere = re.compile(
        r"docs/|operators/|rbm_kernels/ops/|benchmarks/notes[/.]|(contributing|changelog)\.md", re.IGNORECASE
    )
    assert [name for name in named if (ROOT / "docs" / name).is_file() or elsewhere.match(name)] == []


def test_the_map_of_methods(pages, site):
    """Each leaf links to a section of docs/methods.md, which covers all methods; figures match the pages of results."""
    sections = {heading.lower() for heading in re.findall(r"(?m)^### (\S+)$", PAGES["docs/methods.md"])}
    assert {name.removesuffix("_plus") for name in METHODS} == sections
    text = PAGES["docs/choose.md"].split('<div class="choose" markdown>')[1].split("</div>")[0]
    items = re.split(r"(?m)^ *- ", text)[1:]
    ends = [item for item in items if "**" not in item]
    assert len(ends) > 5
    for end in ends:
        linked = re.findall(r"\]\(methods\.md#(\w+)\)", end)
        assert set(linked) & (sections | {"teachers"}), end
    figures = set(re.findall(r"\d+[.,]\d+", PAGES["docs/choose.md"]))
    assert len(figures) > 3
    results = PAGES["docs/results.md"] + PAGES["docs/newer.md"] + PAGES["docs/newer-evidence.md"]
    assert figures - set(re.findall(r"\d+[.,]\d+", results)) == set()


@pytest.mark.skipif(programs() is None, reason="needs Chromium and ChromeDriver (apt-get install chromium-driver)")
def test_search_and_map_of_a_site_on_the_disk(site, tmp_path):
    """For pages opened from a folder, search works, and the map fits a phone in light and dark mode."""
    type_in = (
        "document.querySelector('#__search').click(); const field = document.querySelector('[name=query]');"
        "field.focus(); field.value = 'homophily'; field.dispatchEvent(new KeyboardEvent('keyup'))"
    )
    grounds = set()
    with browser(tmp_path / "profile") as window:
        for width, scheme in ((390, "light"), (1280, "dark")):
            window.set_viewport(width, 900, scheme)
            for page in ("operators/cosine_topk.html", "choose.html"):  # wide formulas; the map
                window.open(site / page)
                assert window.run("return document.documentElement.scrollWidth") <= width, page
            boxes = window.run(
                "return [...document.querySelectorAll('.choose p')].map(p => p.getBoundingClientRect())"
                ".map(b => [b.left, b.right, b.height])"
            )
            assert all(left >= 0 and right <= width and height > 20 for left, right, height in boxes)
            assert len({round(left) for left, *_ in boxes}) == 4, "four columns, or four steps to the right"
            grounds.add(window.run("return getComputedStyle(document.body).backgroundColor"))
        assert len(grounds) == 2
        window.run(type_in)
        end = time.monotonic() + 60
        while not (found := window.run("return document.querySelectorAll('.md-search-result__link').length")):
            assert time.monotonic() < end, window.messages()
            time.sleep(0.1)
        assert found > 1
        assert window.messages() == []


def test_formulas_are_drawn(site):
    drawn = 0
    for path in site.rglob("*.html"):
        text = path.read_text()
        assert 'class="arithmatex"' not in text, f"{path} has a formula that was not turned into MathML"
        for formula in re.findall(r"<math.*?</math>", text, flags=re.DOTALL):
            drawn += 1
            letters = "".join(ElementTree.fromstring(formula).itertext())
            assert "\\" not in letters.replace("\\_", "_"), f"{path}: {formula}"
    assert drawn > 200


def test_reference_reads_as_the_docstrings_do(site):
    layer = (site / "api/layer.html").read_text()
    assert "memory vectors follow the rows by a moving average" in layer
    for page in ("rbm", "layer", "students", "config", "parts", "kernels"):
        text = re.sub(r"<[^>]+>", "", (site / f"api/{page}.html").read_text())
        assert not re.search(r":(class|func|meth|mod|attr|data|math):|={5,}", text), page
        assert not re.search(r"[a-z]\w*: [^=\n]+ = [A-Z_]{4,},", text), f"{page} has a constant for a default"


def test_the_reference_lists_every_setting_with_its_default(site):
    page = re.sub(r"\s+", " ", (site / "api/config.html").read_text())
    for section in (RbMConfig, TokenizerConfig):
        for name, values, default in settings_of(section):
            row = (f"<code>{name}</code>", html.escape(values), f"<code>{as_text(default)}</code>")
            assert " ".join(f"<td>{cell}</td>" for cell in row) in page, name


@pytest.mark.parametrize("package", [rbm, rbm_kernels], ids=lambda package: package.__name__)
def test_the_reference_lists_every_public_name(package):
    """Each on its own, or with the module that defines it."""
    listed = {
        line for page, text in PAGES.items() for line in re.findall(r"(?m)^::: (\S+)$", text) if "docs/api" in page
    }
    for name in set(package.__all__) - {"__version__"}:
        item = getattr(package, name)
        assert {item.__module__, f"{item.__module__}.{item.__qualname__}"} & listed, f"{package.__name__}.{name}"


def test_pages_name_tests_that_exist():
    """Each claim in docs/reliability.md names the test that checks it."""
    named = {(page, name) for page, text in PAGES.items() for name in re.findall(r"`(tests/[\w/]+\.py)`", text)}
    assert len({name for page, name in named if page == "docs/reliability.md"}) > 15
    assert [(page, name) for page, name in named if not (ROOT / name).is_file()] == []
