"""Rows of every method: for several seeds, and for the table of newer methods."""

import csv
from dataclasses import replace

from rbm.config.tree import parse_assignments
from rbm.distillation.registry import METHODS
from rbm.experiments.paper_tables import read_table
from rbm.experiments.results import read_rows
from rbm.experiments.runner import run_experiment

SECTIONS = (
    *("teacher", "mlp", "rbm", "moe", "glnn", "krd", "nosmog", "cohop", "hgmd", "tined", "tined_plus", "simmlp"),
    *("vqgraph", "vqgraph.tokenizer", "sign", "trees"),
)
SMALL = {f"{section}.max_epochs": 2 for section in SECTIONS} | {
    "moe.pretrain_epochs": 1,
    "rbm.pretrain_epochs": 1,
    "ensemble.members": 2,
    "simmlp.hidden_channels": 8,
    "simmlp.head_epochs": 2,
    "vqgraph.tokenizer.codebook_size": 20,
    "trees.leaves": 3,
    "distill.source": "teacher",  # TINED copies the teacher's layers, and this teacher has few epochs
}
SMALL |= {f"{section}.deepwalk": "false" for section in ("encoding", "nosmog.encoding", "tined_plus.encoding")}


def test_each_has_a_row_for_every_seed(command, tmp_path):
    changes = [f"--set={key}={value}" for key, value in SMALL.items()]
    chosen = ("--method", ",".join(METHODS), "--seeds", "0-1", *changes)
    status, _, err = command("distill", *chosen, "--out", tmp_path / "rows.csv", "--cache", tmp_path)
    assert status == 0, err
    with open(tmp_path / "rows.csv") as file:
        found = sorted((row["method"], row["seed"]) for row in csv.DictReader(file))
    assert found == sorted((method, seed) for method in ("teacher", *METHODS) for seed in "01")


def test_the_table_of_newer_ones_has_all_columns(tmp_path):
    table = replace(read_table("newer"), settings=("inductive",))
    changes = parse_assignments([f"{key}={value}" for key, value in SMALL.items()])
    experiments = table.experiments(datasets=("digits",), seeds=(0,), changes=changes)
    run_experiment(experiments, tmp_path / "rows.csv", cache=tmp_path)
    found = {(row["method"], row["variant"]) for row in read_rows(tmp_path / "rows.csv")}
    assert found == {(column.method, column.variant) for column in table.columns.values()}
