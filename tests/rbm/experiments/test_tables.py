"""Tables of rows, next to the paper's figures."""

from rbm.experiments.comparisons import gains_table
from rbm.experiments.paper_tables import lines_of, render, table_of
from rbm.experiments.results import COLUMNS
from rbm.experiments.statistics import Summary
from rbm.experiments.tables import Group, group_rows, main_table, paper_tables, percent, variants_table


def row(method, seed, test, variant="", **more):
    values = {"dataset": "cora", "setting": "inductive", "protocol": "rbm", "teacher": "sage", "preset": "clean"}
    values |= {"variant": variant, "method": method, "seed": str(seed)}
    values |= {"test_at_best_val": str(test), "test_max": str(test + 0.01)}
    return {**dict.fromkeys(COLUMNS, ""), **values, **more}


def test_main_table_sets_ours_beside_the_papers():
    rows = [row("rbm", seed, 0.8 + seed / 100) for seed in range(3)] + [row("mlp", seed, 0.79) for seed in range(2)]
    rows += [row("mlp", 7, 0.1)]  # beside no RbM
    rows += [row("teacher", seed, 0.7 + seed / 100) for seed in range(5)]  # two of them beside no student
    header, _, line = main_table(rows).strip().split("\n")
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert dict(zip([name.strip(" *") for name in header.strip("|").split("|")], cells, strict=True)) == {
        "dataset": "cora",
        "setting": "inductive",
        "seeds": "3",
        "paper's RbM": "77.44 ± 1.08",
        "RbM, best test": "82.00 ± 1.00",
        "RbM, test": "**81.00 ± 1.00**",
        "MLP, test": "79.00 ± 0.00, 2 seeds",
        "teacher, test": "71.00 ± 1.00",
        "RbM - MLP": "+1.50",
        "p": "0.205",
    }


def test_main_table_has_all_methods_and_no_empty_column():
    path = "/data/graphs/rings.npz"
    rows = [row(method, seed, 0.8, dataset=path) for method in ("rbm", "mlp", "glnn", "teacher") for seed in range(2)]
    header, _, line = main_table(rows, ["glnn", "mlp", "krd", "rbm"]).strip().split("\n")
    names = [name.strip(" *") for name in header.strip("|").split("|")]
    assert names == [
        *("dataset", "setting", "seeds", "RbM, best test", "RbM, test", "GLNN, test", "MLP, test", "teacher, test"),
        *("RbM - MLP", "p"),
    ]
    assert line.startswith("| rings | inductive | 2 | 81.00 ± 0.00 | **80.00 ± 0.00** | 80.00 ± 0.00 | 80.00 ± 0.00 |")
    assert main_table([row("mlp", 0, 0.8)]) == ""


def test_graphs_of_another_protocol_stand_for_themselves():
    rows = [row("rbm", 0, 0.8), row("rbm", 0, 0.7, protocol="cpf")]
    of_paper, of_other = main_table(rows).strip().split("\n")[2:]
    assert of_paper.startswith("| cora | inductive | 1 | 77.44 ± 1.08 |")
    assert of_other.startswith("| cora (cpf) | inductive | 1 |  |")


def test_rows_of_other_teachers_and_presets_stand_for_themselves():
    """Regression test: they were in one group, so a later row with the same seed replaced an earlier one."""
    rows = [row("rbm", 0, 0.8), row("rbm", 0, 0.7, teacher="gcn"), row("rbm", 0, 0.6, preset="official")]
    rows += [row("teacher", 0, 0.9), row("teacher", 0, 0.5, teacher="gcn")]
    sage, gcn, official = main_table(rows).strip().split("\n")[2:]
    assert sage.startswith("| cora | inductive | 1 | 77.44")
    assert "**80.00**" in sage
    assert "| 90.00 |" in sage
    assert gcn.startswith("| cora (gcn teacher) |")
    assert "**70.00**" in gcn
    assert "| 50.00 |" in gcn
    assert official.startswith("| cora (official) |")
    assert "**60.00**" in official


def test_main_table_has_variants_beside_their_teacher_and_the_transductive_setting_last():
    rows = [row("rbm", 0, 0.8, setting="transductive"), row("rbm", 0, 0.7, variant="w/o"), row("rbm", 0, 0.6)]
    rows += [row("teacher", 0, 0.9), row("rbm", 0, 0.5, setting="transductive", teacher="gcn")]
    default, without, transductive, gcn = main_table(rows).strip().split("\n")[2:]
    assert default.endswith("| **60.00** | 90.00 |")
    assert without.startswith("| cora w/o | inductive | 1 |")
    assert without.endswith("| **70.00** | 90.00 |")
    assert transductive.startswith("| cora | transductive | 1 | 84.86 ± 0.46 |")
    assert gcn.startswith("| cora (gcn teacher) | transductive | 1 | 85.02 ± 0.29 |")


def test_variants_table():
    rows = [row("rbm", 0, 0.8), row("rbm", 0, 0.7, variant="w/o"), row("teacher", 0, 0.9)]
    header, _, line, _ = variants_table(rows).split("\n")
    assert header == "| | default | w/o |"
    assert line == "| cora, inductive | 80.00 | 70.00 |"
    assert percent(
        group_rows(rows)[Group("cora", "inductive", "rbm", "sage", "clean", "")]["rbm"], "test_max"
    ) == Summary(81.0, 0.0, 1)


def test_a_variant_called_default_is_not_the_one_without_a_name():
    rows = [row("rbm", 0, 0.8), row("rbm", 0, 0.7, variant="default")]
    assert variants_table(rows).split("\n")[::2] == [
        "| | (no name) | default |",
        "| cora, inductive | 80.00 | 70.00 |",
    ]


def test_names_with_a_bar_stay_in_their_cell():
    rows = [
        row("rbm", 0, 0.8, variant="a|b", dataset="/x|y.npz"),
        row("mlp", 0, 0.7, variant="a|b", dataset="/x|y.npz"),
    ]
    for text, line in ((variants_table(rows), r"| | a\|b |"), (main_table(rows), r"| x\|y a\|b | inductive | 1 |")):
        assert line in text
    assert render(table_of(rows), rows).startswith(r"| | seeds | MLP a\|b | RbM a\|b |")
    assert r"| rbm, a\|b | 1 | +10.00 |" in gains_table(rows, "mlp, a|b")


def test_graphs_with_one_file_name_stand_for_themselves():
    """Regression test: the last one replaced the others in tables of variants and gains."""
    rows = [
        row(method, 0, test + shift, dataset=dataset)
        for dataset, shift in (("/a/g.npz", 0.0), ("/b/g.npz", 0.1), ("/b/other.npz", 0.2))
        for method, test in (("mlp", 0.6), ("rbm", 0.65))
    ]
    begins = [line.split(" | ")[0] for line in variants_table(rows).split("\n")[2:5]]
    assert begins == ["| /a/g.npz, inductive", "| /b/g.npz, inductive", "| other, inductive"]
    assert [line.split(" | ")[0] for line in main_table(rows).split("\n")[2:5]] == [
        "| /a/g.npz",
        "| /b/g.npz",
        "| other",
    ]
    assert "| rbm | 3 | +5.00 | +5.00 | +5.00 | +5.00 |" in gains_table(rows, "mlp")
    assert len({line.dataset for line in lines_of(table_of(rows), rows)}) == 3


def test_papers_tables_are_there():
    assert paper_tables()["sage_distillation"]["cora"]["transductive"]["RbM"] == [84.86, 0.46]
