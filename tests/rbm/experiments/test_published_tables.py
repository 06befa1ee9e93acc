"""Every accuracy in README, docs/results.md and results/, compared with an independent computation from the rows.

The CSV files are read with pandas and evaluated with SciPy, without ``rbm.experiments``.
"""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import yaml
from scipy.stats import ttest_rel

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "rbm" / "config" / "configs"
PAPER = json.loads((CONFIGS / "paper" / "tables.json").read_text())
TEACHERS = {"sage": "GraphSAGE", "gcn": "GCN", "revgat": "RevGNN", "drgat": "DRGAT"}
MAXIMUM = "Maximum over epochs"
PAGES = [page for page in sorted((ROOT / "results" / "paper").glob("*.md")) if MAXIMUM in page.read_text()]


def runs(name: str, **of: str) -> pd.DataFrame:
    """The rows of a CSV file in results/ for one protocol, teacher and preset, with accuracies in per cent."""
    rows = pd.read_csv(ROOT / "results" / f"{name}.csv", keep_default_na=False)
    rows[["test_at_best_val", "val", "test_max"]] *= 100
    for column, value in {"preset": "clean", "teacher": "sage", "protocol": "rbm", **of}.items():
        rows = rows[rows[column] == value]
    return rows


def by_seed(rows: pd.DataFrame, dataset: str, setting: str, method: str, variant: str = "", column="test_at_best_val"):
    variant = "" if method == "teacher" else variant
    wanted = {"dataset": dataset, "setting": setting, "method": method, "variant": variant}
    for name, value in wanted.items():
        rows = rows[rows[name] == value]
    assert not rows["seed"].duplicated().any()
    return rows.set_index("seed")[column]


def shown(values: pd.Series) -> str:
    """Mean and sample standard deviation, as printed in tables."""
    if values.empty:
        return ""
    return f"{values.mean():.2f} ± {values.std(ddof=1):.2f}" if len(values) > 1 else f"{values.mean():.2f}"


def other_seeds(count: int, usual: int) -> str:
    """What follows a figure whose number of seeds is not that of its line."""
    return "" if count in (0, usual) else f", {count} seed" if count == 1 else f", {count} seeds"


def difference(first: pd.Series, second: pd.Series) -> list[str]:
    both = pd.concat([first, second], axis=1, join="inner").to_numpy()
    p = ttest_rel(both[:, 0], both[:, 1]).pvalue
    return [f"{(both[:, 0] - both[:, 1]).mean():+.2f}", f"{p:.3f}" if p >= 0.001 else "< 0.001"]


def cells(line: str) -> list[str]:
    return [cell.strip().replace("*", "") for cell in line.strip().strip("|").split("|")]


def table(page: str, name: str) -> list[list[str]]:
    """The cells of a marked table on a page, header first."""
    text = (ROOT / page).read_text()
    lines = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)[1].splitlines()
    return [cells(line) for line in lines if line.startswith("|") and not line.startswith("|---")]


@pytest.mark.parametrize(("name", "file"), [("digits", "digits"), ("paper", "paper")])
def test_table_of_an_experiment(name, file):
    header, *lines = table("docs/results.md", name)
    beside = ["paper's RbM"] if name == "paper" else []  # the paper has no digits
    assert header[3:-2] == [*beside, "RbM, best test", "RbM, test", "MLP, test", "teacher, test"]
    assert lines
    for dataset, setting, *line in lines:
        graph, protocol = re.fullmatch(r"(\S+)(?: \((\w+)\))?", dataset).groups()
        rows = runs(file, protocol=protocol or "rbm")
        rbm, mlp, teacher = (by_seed(rows, graph, setting, method) for method in ("rbm", "mlp", "teacher"))
        published = PAPER["sage_distillation"].get(graph, {}).get(setting, {}).get("RbM")
        assert line == [
            str(len(rbm)),
            *["{:.2f} ± {:.2f}".format(*published) if published and not protocol else "" for _ in beside],
            shown(by_seed(rows, graph, setting, "rbm", column="test_max")),
            *map(shown, (rbm, mlp, teacher[teacher.index.isin(rbm.index)])),
            *difference(rbm, mlp),
        ], (dataset, setting)


def test_table_of_the_readme():
    header, *lines = table("README.md", "accuracy")
    assert header == ["dataset", "setting", "seeds", "RbM", "MLP", "teacher", "RbM - MLP", "p"]
    assert len(lines) == 12
    rows = runs("paper")
    for dataset, setting, *line in lines:
        of = {method: by_seed(rows, dataset, setting, method) for method in ("rbm", "mlp", "teacher")}
        expected = [str(len(of["rbm"])), *map(shown, of.values()), *difference(of["rbm"], of["mlp"])]
        assert line == expected, (dataset, setting)


def columns_of(name: str) -> dict[str, dict]:
    return yaml.safe_load((CONFIGS / "tables" / f"{name}.yaml").read_text())


def bracketed(cell: str) -> tuple[str, str]:
    """Our figure and the paper's mean in a cell such as ``78.94 ± 0.70 (77.44)``."""
    ours, paper = re.fullmatch(r"([^(]*)(?:\((.*)\))?", cell).groups()
    return ours.strip(), paper or ""


def test_table_of_all_students():
    header, *lines = table("docs/results.md", "students")
    columns = columns_of("main")["columns"]
    assert header[2:] == list(columns)
    methods, rows = [column["method"] for column in columns.values()], runs("paper")
    lines = [line for line in lines if ", " in line[0] and not line[0].startswith("median")]
    assert len(lines) == 6
    for name, seeds, *line in lines:
        graph, setting = name.split(", ")
        of = pd.concat([by_seed(rows, graph, setting, method) for method in methods], axis=1, join="inner")
        assert seeds == str(len(of))
        assert [bracketed(cell)[0] for cell in line] == [shown(of.iloc[:, i]) for i in range(len(methods))], name
        published = PAPER["sage_distillation"][graph][setting]
        expected = [f"{published[title][0]:.2f}" if title in published else "" for title in columns]
        assert [bracketed(cell)[1] for cell in line] == expected, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_of_the_paper(page):
    name, _, protocol = page.stem.partition("-")
    content = columns_of(name)
    parts = page.read_text().split(MAXIMUM)
    for column, text in zip(("test_at_best_val", "test_max"), parts, strict=True):
        header, *lines = [cells(line) for line in text.splitlines() if line.startswith("|") and "---" not in line]
        assert header[2:] == list(content["columns"])
        lines = [line for line in lines if not line[0].startswith("median")]
        assert lines
        for name_of_line, seeds, *line in lines:
            graph, setting, *teacher = name_of_line.split(", ")
            teacher = teacher[0] if teacher else content.get("teachers", ["sage"])[0]
            rows = runs("paper", protocol=protocol or "rbm", teacher=teacher)
            found = [
                by_seed(rows, graph, setting, each["method"], each.get("variant", ""), column)
                for each in content["columns"].values()
            ]
            expected = [shown(each) + other_seeds(len(each), int(seeds)) for each in found]
            assert [bracketed(cell)[0] for cell in line] == expected, (page.name, name_of_line, column)


def test_the_command_prints_these_tables(command):
    """Regression test: rows of several teachers and presets were mixed into one group."""
    status, out, _ = command("table", ROOT / "results" / "paper.csv")
    assert status == 0
    printed, documented = [cells(line) for line in out.splitlines()[2:]], table("docs/results.md", "paper")[1:]
    assert [line for line in printed if line in documented] == documented
