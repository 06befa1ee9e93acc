"""Searches with a judge that takes no time."""

from rbm.config import Config
from rbm.distillation.auto.folder import new_study
from rbm.distillation.auto.search import Search
from rbm.distillation.auto.space import Space

METHODS = ("mlp", "rbm")


def answers_of(share, half, nodes=2000):
    """Answers of which this share is right, for the validation nodes that a half holds out."""
    held_out = [node for node in range(nodes) if (node >> half // 2) % 2 == half % 2]
    found = ["-"] * nodes
    for place, node in enumerate(held_out):
        found[node] = "1" if place < round(share * len(held_out)) else "0"
    return "".join(found)


def quality(point, half):
    """How good a point is, as if it were known: the teacher appnp and many labels, a little noise of the half."""
    good = {"teacher": "appnp", "distill.label_weight": 0.8, "encoding": "none", "mlp.dropout": 0.3}
    right = sum(point.get(name) == value for name, value in good.items())
    return answers_of(0.6 + 0.05 * right + 0.001 * ((half + len(point["teacher"])) % 3), half)


def search_of(judge=quality, study=None, budget=100.0, given=None, **options):
    given = given or Config()
    space = Space(given, METHODS, **options)
    return Search(space, judge, study or new_study(), budget=budget, seed=0, note=lambda *_: None)
