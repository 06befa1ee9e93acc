"""What a run was given besides its configuration: hashes, so that it is not resumed on something else, and choices."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn
from torch_geometric.data import Data

from rbm.datasets.readers.node_ids import IDS, INPUTS, NodeIds
from rbm.distillation.auto.folder import BEGUN, choices_of_search
from rbm.distillation.choices import Choices
from rbm.distillation.run_graph import check_resumed_graph, graph_hashes
from rbm.training.run_folder import RunFolder
from rbm.utils.files import as_json, read_json
from rbm.utils.tensor_files import fingerprint

_GIVEN = ("teacher", "encodings")  # by a caller in Python
METHODS, KEEP, LABELS_ALONE = _CHOICES = ("methods", "keep", "labels_alone")  # beside the hashes


def hashes(
    data: Data, teacher: nn.Module | Tensor | None, encodings: Sequence[Tensor], unseen_fraction: float | None
) -> dict[str, str | float]:
    """A hash of each part of a run's arguments that training depends on, and of the ids of nodes, by its name;
    ``unseen_fraction`` as it is.

    Args:
        data: the graph.
        teacher: a given module, identified by its parameters and buffers, or logits; None if one is trained.
        encodings: further columns of a student's input.
        unseen_fraction: as given to :func:`rbm.distill`; None stands for that of the graph.
    """
    parts: dict[str, list[Tensor]] = {}
    if isinstance(teacher, nn.Module):
        state = {name: value for name, value in teacher.state_dict().items() if isinstance(value, Tensor)}
        parts["teacher"] = [state[name] for name in sorted(state)]
    elif isinstance(teacher, Tensor):
        parts["teacher"] = [teacher]
    if len(encodings):
        parts["encodings"] = list(encodings)
    given = {name: fingerprint("input", name, tensors) for name, tensors in parts.items()}
    found: dict[str, str | float] = {**graph_hashes(data), **given}
    if isinstance(ids := data.get(IDS), NodeIds):
        found[IDS] = ids.checksum()
    fraction = data.get("unseen_fraction") if unseen_fraction is None else unseen_fraction
    return found if fraction is None else found | {"unseen_fraction": float(fraction)}


def choices_of(folder: Path | None, auto: bool) -> Choices:
    """What the run in a folder, or with ``auto`` its search, was asked for when it was started or last resumed; the
    defaults for what is unknown, or without a folder.
    """
    if folder is None:
        return Choices()
    path = folder / INPUTS
    if (auto or not path.is_file()) and (folder / BEGUN).is_file():
        return choices_of_search(folder)
    given = read_json(path) if path.is_file() else {}
    return Choices(given.get(METHODS), given.get(KEEP), given.get(LABELS_ALONE, True))


def check_inputs(run: RunFolder, now: dict[str, str | float], asked: Choices, graph: Data, resume: bool) -> None:
    """Compare the hashes with those of the run that is resumed, and store them with what it is ``asked`` for, which may
    be something else than before.

    A run of an earlier version has no hashes: they are stored when it is resumed, if the sizes of ``graph``, the graph
    of the split, are those of the run.

    Raises:
        ValueError: a resumed run was started with other inputs.
    """
    if resume:
        check_resumed_graph(run.path, graph)
    path, given = run.path / INPUTS, {**now, METHODS: [*asked.methods]}
    if asked.keep is not None:
        given[KEEP] = asked.keep
    if not asked.labels_alone:
        given[LABELS_ALONE] = False
    was = read_json(path) if resume and path.is_file() else None
    if was is not None:
        changed = [name for name in {**was, **now} if was.get(name) != now.get(name) and name not in _CHOICES]
        if IDS not in was:  # in runs of earlier versions
            changed = [name for name in changed if name != IDS]
        if lacking := [name for name in _GIVEN if name in changed and name not in now]:
            raise ValueError(
                f"run folder {run.path} was started from Python with {' and '.join(lacking)} of your own, and is"
                f" resumed without; resume it there, rbm.distill(..., folder={str(run.path)!r}, resume=True), with the"
                " same. Commands take another of its students by --method"
            )
        if changed:
            raise ValueError(
                f"run folder {run.path} was started with another {', '.join(changed)}; resume with the same, or write"
                " to another folder; a finished run predicts the nodes of a graph that has grown by rbm predict --graph"
            )
    if was != given:
        run.write_text(INPUTS, as_json(given))
