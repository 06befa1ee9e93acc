"""Counts the codes of VQGraph's tokenizer that are in use, together with its validation accuracy.

Cora, 5,000 codes, half of the validation nodes in place of the test set (``evaluate_on: validation``). One row per
tokenizer: the number of codes used by the rows of the observed nodes, before training and at the best epoch, and the
accuracies there. With ``replaced``, codes that almost no row uses are replaced by rows after every step. The library
from which the released code takes its codebook does this; the released code does not. Rows that OUT already has are not
run again.

    python experiments/vqgraph_codes.py ROOT results/vqgraph_codes.csv
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

import rbm
from rbm.config import Config, TokenizerConfig
from rbm.config.presets import preset_config
from rbm.datasets.splits import split_for
from rbm.distillation.methods.vqgraph import Codebook, Tokenizer, TokenizerTrainer
from rbm.training.loop import fit
from rbm.training.selection import EpochLimits
from rbm.utils.files import append_csv, read_csv
from rbm.utils.progress import Progress

# A code is replaced by a row if the running mean of the number of rows that use it is below this.
IDLE = 0.2
# The released settings for a GCN, and for the version with sampled neighbours.
GCN = {"dropout": 0.8, "weight_decay": 0.001, "hidden_channels": 64}
SAMPLED = {"dropout": 0.0, "weight_decay": 0.0005, "hidden_channels": 128}
# Codes as wide as the features, which are as stored; training them takes too long for a search on a CPU.
RELEASED = {"code_channels": 1433, "lr": 1e-4, "code_start": "random"}
VARIANTS = {
    "random": ("rbm", {"code_start": "random"}),
    "rows": ("rbm", {"code_start": "rows"}),
    "rows, replaced": ("rbm", {"code_start": "rows"}),
    "random, dropout 0.5": ("rbm", {"code_start": "random", "dropout": 0.5}),
    "rows, dropout 0.5": ("rbm", {"code_start": "rows", "dropout": 0.5}),
    "rows, as for sampled neighbours": ("rbm", {"code_start": "rows", **SAMPLED}),
    "as released, untrained": ("cpf", RELEASED),
}
SEEDS = (0, 1)


class ReplacingCodebook(Codebook):
    """Replaces codes that few rows use by rows of the step."""

    taken: Tensor

    def _follow(self, unit: Tensor, codes: Tensor, nearest: Tensor) -> None:
        super()._follow(unit, codes, nearest)
        counts = torch.bincount(nearest, minlength=len(codes)).float()
        self.taken = getattr(self, "taken", torch.ones(len(codes))).lerp(counts, 1 - self.decay)
        idle = (self.taken < IDLE).nonzero().flatten()
        rows = unit[unit.norm(dim=1) > 0]
        self.codes[idle] = rows[torch.randint(len(rows), (len(idle),))]
        self.taken[idle] = 1.0


def configuration(protocol: str, seed: int) -> Config:
    return preset_config("clean", "cora", protocol=protocol).updated({"seed": seed, "evaluate_on": "validation"})


def figures(config: Config, tokenizer: TokenizerConfig, root: str, variant: str) -> dict[str, object]:
    """Figures of a tokenizer; for one that is not trained, only the codes before training."""
    split = split_for(config, rbm.load_dataset("cora", root, protocol=config.protocol, seed=config.seed))
    torch.manual_seed(config.seed)
    model = Tokenizer(split.graph.num_features, split.graph.num_classes, tokenizer)
    trainer = TokenizerTrainer(model, split, tokenizer)
    if "replaced" in variant:
        model.codebook.__class__ = ReplacingCodebook
    model.eval()  # codes do not change
    before = len(trainer.tokens()[0].nearest.unique())
    if "untrained" in variant:
        return {"codes_before": before, **dict.fromkeys(("codes", "val", "held_out", "best_epoch", "epochs"), "")}
    limits = EpochLimits(tokenizer.max_epochs, tokenizer.patience)
    result = fit("tokenizer", trainer, limits, progress=Progress(None))
    return {
        "codes_before": before,
        "codes": len(trainer.tokens()[0].nearest.unique()),
        "val": f"{result.val_accuracy:.4f}",
        "held_out": f"{result.test_accuracy:.4f}",
        "best_epoch": result.best_epoch,
        "epochs": result.epochs,
    }


def main(root: str, out: str) -> None:
    path = Path(out)
    done = {(row["variant"], row["seed"]) for row in read_csv(path, missing_ok=True)}
    for variant, (protocol, changes) in VARIANTS.items():
        for seed in SEEDS:
            if (variant, str(seed)) in done:
                continue
            config = configuration(protocol, seed).updated({"vqgraph": {"tokenizer": {**GCN, **changes}}})
            found = figures(config, config.vqgraph.tokenizer, root, variant)
            append_csv(path, [{"protocol": protocol, "variant": variant, "seed": seed, **found}])


if __name__ == "__main__":
    main(*sys.argv[1:])
