"""The model card of a student: what it is, how to load it, and the results of its run."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import Tensor, nn

from rbm.nn.parameters import count_parameters
from rbm.utils.files import read_json, read_text, read_yaml
from rbm.utils.tensor_files import read_sealed

_TAGS = ["graph-neural-networks", "knowledge-distillation", "mixture-of-experts", "node-classification"]


def model_card(
    student: nn.Module, arguments: dict[str, Any], tensors: dict[str, Tensor], place: str, run: Path | None
) -> ModelCard:
    """The card of a student.

    Args:
        student: student with ``in_channels``.
        arguments: arguments that rebuild the student.
        tensors: state of the student on the CPU, which identifies it in the run.
        place: argument of ``rbm.hub.load`` in the card's example.
        run: run folder of the student, or None for a card without results.

    Raises:
        FileNotFoundError: ``run`` does not contain a finished run.
        ValueError: no student of the run has these weights.
    """
    data: dict[str, Any] = {"library_name": "rbm-kernels", "tags": _TAGS}
    kind, inputs, figures = type(student).__name__, student.row, []
    if run is not None:
        summary, table, method, split = _read(run, tensors)
        if encodings := student.in_channels - summary["features"]:
            inputs = f"{summary['features']} features and, behind them, {encodings} {student.beside}"
        data |= {"model_name": f"{kind} of {summary['dataset']}", "metrics": ["accuracy"]}
        data["eval_results"] = [_result(summary, method, split)]
        figures = [
            "## Figures\n",
            f"The row of this student is that of the method `{method}`; *test* means {split} nodes.\n",
            table,
        ]
    total, active = count_parameters(student)
    lines = [
        f"---\n{ModelCardData(**data).to_yaml()}\n---\n",
        f"# {data.get('model_name', kind)}\n",
        "A student of the package `rbm-kernels`, which distils graph neural networks into models that need no graph.",
        f"It maps rows of {inputs} to logits.\n",
        f'```python\nimport rbm\n\nstudent = rbm.hub.load("{place}")\n```\n',
        f"{total:,} parameters, of which one prediction uses {active:,}. Made by",
        f"`{kind}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})`.\n",
        *figures,
    ]
    return ModelCard("\n".join(lines))


def _read(run: Path, tensors: dict[str, Tensor]) -> tuple[dict[str, Any], str, str, str]:
    """Summary and table of a run, the method with these weights, and a description of its test nodes."""
    for name in ("config.yaml", "summary.json"):
        if not (run / name).is_file():
            raise FileNotFoundError(f"{run} holds no {name}: it is no run folder, or its run is not finished")
    summary = read_json(run / "summary.json")
    if lacking := [name for name in ("dataset", "setting", "features") if name not in summary]:
        raise ValueError(f"{run / 'summary.json'} lacks {', '.join(lacking)}: it is not what a run wrote")
    config = read_yaml("configuration", run / "config.yaml")
    evaluate_on = config.get("evaluate_on", "test") if isinstance(config, dict) else "test"
    # If the graph is a file, only its name is published, not its path.
    dataset = Path(summary["dataset"]).stem
    # Version 0.1.0 only wrote results.md from the command line, and with the path of the file.
    file = run / "results.md"
    table = read_text(file).replace(summary["dataset"], dataset) if file.is_file() else ""
    summary["dataset"] = dataset
    for method in (key for key, value in summary.items() if isinstance(value, dict) and key != "teacher"):
        file = run / f"{method}.safetensors"
        if file.is_file() and _equal(read_sealed(file)[0], tensors):
            return summary, table, method, "held-out validation" if evaluate_on == "validation" else "test"
    raise ValueError(f"run is {run}, but none of its students has these weights, so its figures belong to others")


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _result(summary: dict[str, Any], method: str, split: str) -> EvalResult:
    return EvalResult(
        task_type="node-classification",
        dataset_type=summary["dataset"],
        dataset_name=f"{summary['dataset']}, {summary['setting']}",
        dataset_split=split,
        metric_type="accuracy",
        metric_value=round(summary[method]["test_accuracy"], 6),
    )
