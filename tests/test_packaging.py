"""The files of a release: tags of wheels, a package without libraries, the workflows and their scripts."""

import ast
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml
from scripts import load_script

from tests import versions

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path for path in (ROOT / ".ci").glob("*") if path.is_file())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the sources")


@pytest.fixture
def package_setup(monkeypatch):
    """``setup.py`` as a module, and what it would pass to setuptools."""
    pytest.importorskip("setuptools", "77.0.3")

    def read(platform="linux", build=None):
        passed = {}
        monkeypatch.setattr("setuptools.setup", lambda **arguments: passed.update(arguments))
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.delenv("RBM_BUILD", raising=False)
        if build is not None:
            monkeypatch.setenv("RBM_BUILD", build)
        return load_script("setup.py"), passed

    return read


@pytest.mark.parametrize(
    ("platform", "build", "native"),
    [("linux", None, True), ("linux", "", True), ("linux", "none", False), ("win32", None, False)],
    ids=["linux", "empty", "none", "windows"],
)
def test_one_wheel_for_every_python(package_setup, monkeypatch, platform, build, native):
    """Only if something is compiled does the build need PyTorch and the wheel a platform tag."""
    from setuptools import Distribution

    module, passed = package_setup(platform, build)
    of_this_python = ("cp311", "cp311", "linux_x86_64")
    monkeypatch.setattr("setuptools.command.bdist_wheel.bdist_wheel.get_tag", lambda _: of_this_python)
    command = passed["cmdclass"]["bdist_wheel"](Distribution())
    assert command.get_tag() == ("py3", "none", "linux_x86_64" if native else "any")
    assert passed["setup_requires"] == (module.NATIVE_REQUIREMENTS if native else [])


@pytest.mark.parametrize(
    ("platform", "build", "message"),
    [
        ("linux", "cpu", "RBM_BUILD is 'cpu', expected native or none."),
        ("darwin", "native", "RBM_BUILD=native compiles on Linux alone, and this is darwin"),
    ],
    ids=["word", "mac"],
)
def test_a_build_that_cannot_be_is_named(package_setup, platform, build, message):
    from setuptools.errors import SetupError

    with pytest.raises(SetupError, match=re.escape(message)):
        package_setup(platform, build)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_a_package_without_libraries(tmp_path):
    """Built without compiler and PyTorch, unpacked, and used; libraries of an earlier build are removed."""
    pytest.importorskip("setuptools", "77.0.3")
    tree, out, package = tmp_path / "tree", tmp_path / "out", tmp_path / "package"
    versions.copy_tracked_files(tree)
    stale = tree / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "rbm_kernels" / "lib"
    stale.mkdir(parents=True)
    (stale / "librbm_cpu.so").write_text("of an earlier build")
    out.mkdir()
    build = (
        "import sys; out = sys.argv[1]; sys.modules['torch'] = None; from setuptools import build_meta;"
        "assert build_meta.get_requires_for_build_wheel() == []; build_meta.build_wheel(out)"
    )
    place = {**os.environ, "RBM_BUILD": "none", "PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", build, str(out)], cwd=tree, env=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(package)
    assert [name for name in names if name.endswith(".so")] == []
    assert "rbm_kernels/lib/build_info.json" in names
    report = ROOT / "rbm" / "distillation" / "report" / "templates"
    assert {f"rbm/distillation/report/templates/{path.name}" for path in report.iterdir()} <= set(names)
    helper = ROOT / "tests" / "helpers" / "without_libraries.py"
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        [sys.executable, str(helper), str(tmp_path / "work")],
        cwd=tmp_path,
        env={**place, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split()[-2:] == [str(package)] * 2


POSIX_ONLY = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}


def test_only_the_server_needs_a_posix_system():
    """All other imports of such modules handle their absence, so that the package can be imported on Windows."""
    found = {}
    for path in [*(ROOT / "rbm").rglob("*.py"), *(ROOT / "rbm_kernels").rglob("*.py")]:
        tree = ast.parse(path.read_text())
        guarded = {id(inner) for outer in ast.walk(tree) if isinstance(outer, ast.Try) for inner in ast.walk(outer)}
        for node in ast.walk(tree):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            names |= {node.module} if isinstance(node, ast.ImportFrom) else set()
            if names & POSIX_ONLY:
                found[str(path.relative_to(ROOT))] = id(node) in guarded
    server = {f"rbm/serving/server/{name}.py": False for name in ("connections", "run")}
    assert found == {**server, "rbm/utils/arrays.py": True, "rbm/utils/locks.py": True}


# --- workflows --------------------------------------------------------------------------------------------------------


def workflow(path: Path) -> dict:
    """A workflow's content. YAML 1.1 reads the key ``on`` as true."""
    content = yaml.safe_load(path.read_text())
    content["on"] = content.pop(True)
    return content


def steps():
    """Every step of every job, with its job and its file."""
    for path in WORKFLOWS:
        for name, job in workflow(path)["jobs"].items():
            for step in job["steps"]:
                yield path.name, name, job, step


def test_workflows_are_all_here():
    events = {path.name: set(workflow(path)["on"]) for path in WORKFLOWS}
    assert events == {
        "checks.yml": {"push", "pull_request"},
        "docs.yml": {"push", "workflow_dispatch"},
        "gpu.yml": {"workflow_dispatch"},
        "release.yml": {"push", "workflow_dispatch"},
    }
    for path in WORKFLOWS:
        assert workflow(path)["permissions"] == {"contents": "read"}, "a job asks for more where it needs more"


def test_steps_run_scripts_that_run_anywhere():
    """A step is an action at a version, or a script of .ci/ with arguments; workflows contain no inline scripts."""
    run = [(where, job, step["run"]) for where, job, _, step in steps() if "run" in step]
    assert {shlex.split(command)[0] for *_, command in run} == {
        f".ci/{name}" for name in ("docs", "gpu", "lint", "run", "tag", "try-wheel", "versions", "wheels")
    }
    for where, job, command in run:
        assert "\n" not in command, (where, job)
        script = ROOT / shlex.split(command)[0]
        assert os.access(script, os.X_OK), f"{where}: {job} runs {script}"
    assert all(re.search(r"@(v\d+|release/v\d+)$", step["uses"]) for *_, step in steps() if "uses" in step)
    text = "".join(path.read_text() for path in [*WORKFLOWS, *SCRIPTS])
    assert "://" not in text, "neither a workflow nor a script names a host"


def test_texts_that_people_type_are_no_part_of_a_command():
    """GitHub inserts an expression's text into the script before the shell reads it."""
    for where, job, _, step in steps():
        for expression in re.findall(r"\$\{\{\s*(.*?)\s*\}\}", step.get("run", "")):
            assert expression.startswith("matrix."), f"{where}: {job} puts {expression} into a command"


def test_jobs_need_jobs_that_exist():
    for path in WORKFLOWS:
        jobs = workflow(path)["jobs"]
        for name, job in jobs.items():
            needs = job.get("needs", [])
            for needed in [needs] if isinstance(needs, str) else needs:
                assert needed in jobs, f"{path.name}: {name} needs {needed}"


def test_only_a_tag_publishes_and_only_after_a_trial():
    jobs = workflow(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})} == {"publish"}
    publish = jobs["publish"]
    assert set(publish["needs"]) == {"tag", "build", "try"}
    assert publish["if"] == jobs["tag"]["if"] == "github.ref_type == 'tag'"
    assert publish["environment"] == "release"
    assert not any("run" in step for step in publish["steps"]), "nothing of the tree runs where a release is signed"
    assert jobs["build"]["env"]["RBM_BUILD_CUDA"] == "1"
    assert "secrets." not in "".join(path.read_text() for path in WORKFLOWS)


def test_the_matrix_holds_the_ends_of_what_is_promised():
    project = (ROOT / "pyproject.toml").read_text()
    promised = re.findall(r"Python :: (3\.\d+)", project)
    (matrix,) = (
        job["strategy"]["matrix"]["include"]
        for job in workflow(ROOT / ".github" / "workflows" / "checks.yml")["jobs"].values()
        if "strategy" in job
    )
    assert sorted({row["python"] for row in matrix}) == sorted(promised)
    oldest = ".".join(map(str, versions.OLDEST_TORCH)) + ".0"
    assert {f"{oldest} --lowest", oldest, "newest"} <= {row["arguments"] for row in matrix}
    for row in matrix:  # arguments that the script accepts
        versions.parse([row["arguments"].split()[0], sys.executable, *row["arguments"].split()[1:]])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_whole(script):
    """Bash can parse each script, and each stops at the first failing command."""
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_a_trial_of_a_wheel_has_what_tests_import():
    """``.ci/try-wheel`` copies each folder of the checkout that tests import and the wheel does not have."""
    copied = set(re.search(r"^cp -r (.*) pyproject", (ROOT / ".ci" / "try-wheel").read_text(), re.M)[1].split())
    own = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"rbm", "rbm_kernels"}
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    imported = {name for name in own if any(re.search(rf"^\s*(from|import) {name}\b", text, re.M) for text in texts)}
    assert imported
    assert imported | {"tests"} == copied


@pytest.mark.parametrize(
    ("tag", "date", "message"),
    [
        ("v0.1.0", "2026-12-01", None),
        ("v0.1.1", "2026-12-01", "the tag is 'v0.1.1' and pyproject.toml has version 0.1.0: expected v0.1.0"),
        ("v0.1.0", "unreleased", "CHANGELOG.md has no heading '## 0.1.0 (YYYY-MM-DD)'"),
    ],
    ids=["released", "other", "undated"],
)
def test_a_tag_is_the_version(tmp_path, tag, date, message):
    """The tree's own version, written everywhere."""
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    tag, message = tag.replace("0.1.0", version), message and message.replace("0.1.0", version)
    for name in (".ci/tag", "pyproject.toml", "CITATION.cff", "rbm_kernels/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {version} ({date})\n")
    done = subprocess.run(["bash", ".ci/tag", tag], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (message is None), done.stderr
    assert (message or f"{tag}: the tree has this version everywhere") in done.stderr + done.stdout


def test_the_citation_is_that_of_the_readme():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    paper, readme = citation["preferred-citation"], (ROOT / "README.md").read_text()
    authors = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    for text in (paper["title"], authors, paper["journal"], str(paper["year"]), paper["url"]):
        assert text in readme
    assert citation["version"] == re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
