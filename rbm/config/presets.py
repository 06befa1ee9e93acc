"""Presets: the switches and hyperparameters that the configuration of a dataset starts from.

The paper's equations, its released code and good practice differ in places. A preset chooses between them:

* ``clean``: what we recommend.
* ``paper``: the equations.
* ``official``: the released code with its quirks; slow, because it runs one forward per pair.

The hyperparameters of the paper's nine datasets are the released ones (``configs/paper``), with the initial routing of
the released code, for which they were chosen. Those of its baselines and of students since 2024 come from their code
(``configs/baselines.yaml`` and ``configs/newer.yaml``). Our own hyperparameters are stored as changes to these in
``configs``: for the embedded graph, for datasets where a search on validation nodes found better ones, and for teachers
that the release does not cover (``configs/teachers.yaml``).
"""

from functools import cache, reduce
from importlib import resources
from typing import Any

from rbm.config import Config, merged, parse_assignments
from rbm.config.dataset_names import full_name
from rbm.utils.files import parse_own_yaml

_SWITCHES: dict[str, dict[str, Any]] = {
    "clean": {},
    "paper": {
        "rbm": {"dropout_first_layer": False, "anneal_delta": 0.05, "normalize_memory": False},
        "reliability": {"squared": True},
    },
    "official": {
        "teacher": {"min_epochs": 0},
        "rbm": {"reset_optimizer": False, "memory_weight_decay": True},
        "distill": {
            "temperature_mode": "scaled_log_probs",
            "mean": "pairs",
            "draw": "sample",
            "forward": "pair",
            "batch_size": 4096,
            "reduction": "sum_of_batch_means",
            "shuffle": False,
            "update_memory_on_adversarial": True,
        },
        "encoding": {"fill": "all_mean"},
        "moe": {"extra_experts": 1, "gates_over": "all", "pretrain": "proportional"},
        "glnn": {"zero_weight_pass": True},
        "nosmog": {"zero_weight_pass": True, "encoding": {"fill": "all_mean"}},
    },
}

# How routing begins in the released code. ``clean`` uses it as well, with the hyperparameters that were tuned with it,
# except where results on a graph show that the start of ``RbMConfig`` is better.
_RELEASED_START = {
    "select_pretraining": False,
    "start_as_mlp": False,
    "init_scale": 2.0,
    "init_attention": 1.1,
}

# The settings of `rbm distill --features-only`: students that see features alone.
FEATURES_ONLY = (
    "encoding.deepwalk=false",
    "encoding.label_propagation=false",
    "nosmog.encoding.deepwalk=false",
    "nosmog.encoding.label_propagation=false",
    "cohop.histogram=none",
    "sign.hops=0",
    "tined_plus.encoding.deepwalk=false",
    "tined_plus.encoding.label_propagation=false",
)


def preset_config(
    preset: str, dataset: str, setting: str = "transductive", teacher: str = "sage", protocol: str = "rbm"
) -> Config:
    """The configuration that a preset gives for a dataset.

    Args:
        preset: ``clean``, ``paper`` or ``official``.
        dataset: a name as for :func:`rbm.load_dataset`. For any other name or path, ``clean`` gives the defaults.
        setting: ``transductive`` or ``inductive``.
        teacher: the name of the teacher, as in ``rbm.teachers.TEACHERS``.
        protocol: ``rbm`` or ``cpf``.

    Raises:
        ValueError: an invalid value, or the paper's hyperparameters do not cover this dataset, setting and teacher.
    """
    dataset = _known_name(dataset)
    config = Config(dataset=dataset, setting=setting, preset=preset, protocol=protocol)
    config = config.updated(teacher_settings(teacher)).updated({"teacher": {"name": teacher}})
    released = _released(dataset, setting, teacher)
    ours = _ours(dataset, setting, teacher, protocol)
    if released is None and preset != "clean":
        raise ValueError(
            f"the paper has no hyperparameters for dataset {dataset!r}, setting {setting!r}, teacher {teacher!r};"
            " use the preset clean"
        )
    if released is None and (of_sage := _released(dataset, setting, "sage")):
        # The paper does not tune this teacher: it keeps its own defaults, and its students use those for GraphSAGE.
        released = {name: values for name, values in of_sage.items() if name != "teacher"}
    if released is not None:
        config = config.updated(released)
    config = config.updated(_baselines(dataset, setting, teacher))
    if ours is not None and preset == "clean":
        config = config.updated(ours)
    return config.updated(_SWITCHES[preset])


def _known_name(dataset: str) -> str:
    """The name of a dataset with files in ``configs`` if ``dataset`` is another name of it; otherwise ``dataset``."""
    if not isinstance(dataset, str):
        return dataset
    name = full_name(dataset)
    return name if name == "digits" or _read_of(name, "paper/") else dataset


def features_only(config: Config) -> Config:
    """A configuration whose students see no encodings, whatever their method."""
    return config.updated(parse_assignments(list(FEATURES_ONLY)))


def teacher_settings(teacher: str) -> dict[str, Any]:
    """A teacher's own settings on any graph, from ``configs/teachers.yaml``; most teachers have none."""
    return read_own("teachers.yaml").get(teacher, {})


def _released(dataset: str, setting: str, teacher: str) -> dict[str, Any] | None:
    """The hyperparameters of ``configs/paper``, under the names of :class:`rbm.config.Config`."""
    groups = _read_of(dataset, "paper/").get(setting, {}).get(teacher)
    if groups is None:
        return None
    rbm, mlp, moe = groups["rbm"], groups["mlp"]["student"], groups["moe"]["student"]
    student = dict(rbm["student"])
    student["decay"] = student.pop("memory_momentum")
    student |= _RELEASED_START
    distill, shape = rbm["distill"], ("num_layers", "hidden_channels", "norm", "pretrain_epochs")
    return {
        "teacher": rbm["teacher"],
        "rbm": student,
        "mlp": {key: value for key, value in mlp.items() if key not in shape},
        "moe": moe,
        "distill": {
            "neighbors": True,
            "source": "teacher",
            "label_weight": distill["label_weight"],
            "temperature": distill["temperature"],
            "adversarial_eps": distill["adv_eps"],
            "adversarial_steps": distill["adv_steps"],
        },
        "reliability": rbm["krd"],
        "encoding": rbm["deepwalk"],
    }


def _baselines(dataset: str, setting: str, teacher: str) -> dict[str, Any]:
    """The other methods' own hyperparameters, from ``configs/baselines.yaml`` and ``configs/newer.yaml``."""
    found = {}
    for method, datasets in (read_own("baselines.yaml") | read_own("newer.yaml")).items():
        settings = datasets.get(dataset, {})
        values = settings.get("both") or settings.get(setting, {})
        found[method] = values.get(teacher, values.get("sage", {})) if method == "krd" else values
    return found


def _ours(dataset: str, setting: str, teacher: str, protocol: str) -> dict[str, Any] | None:
    """Our changes from ``configs/DATASET.yaml``, or None; later changes override earlier ones.

    The order is: both settings, then this one, each for any teacher and then for this one. Under the protocol ``rbm``,
    which row-normalises the features of Planetoid's graphs, ``row_normalized`` follows: both settings, then this one.
    """
    found = _read_of(dataset)
    parts = [found.get(where, {}).get(name) for where in ("both", setting) for name in ("any", teacher)]
    if protocol == "rbm":
        parts += [found.get("row_normalized", {}).get(where) for where in ("both", setting)]
    return reduce(merged, filter(None, parts), {}) or None


def _read_of(dataset: str, folder: str = "") -> dict[str, Any]:
    """The file of a named dataset; empty for a path: ``./cora`` would lead to the file of ``cora``."""
    return {} if set(dataset) & {"/", "\\"} else read_own(f"{folder}{dataset}.yaml")


@cache
def read_own(path: str) -> dict[str, Any]:
    """A YAML file of ``rbm/config/configs``, read once, not to be changed; empty if there is no such file."""
    file = resources.files("rbm") / "config" / "configs" / path
    return parse_own_yaml(file.read_text(encoding="utf-8")) if file.is_file() else {}
