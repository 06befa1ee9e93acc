"""Boosted trees: the module predicts like scikit-learn's model, whose rounds are its epochs."""

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from torch.nn.functional import cross_entropy

import rbm
from rbm.config import Config, TreesConfig
from rbm.datasets.encodings import Encodings
from rbm.datasets.splits import split_graph
from rbm.distillation.methods import trees
from rbm.distillation.methods.trees import TreesTrainer, _nodes_of, train_trees
from rbm.distillation.task import DistillationTask
from rbm.nn.trees import TreesStudent, _rounded_down
from rbm.teachers.outputs import outputs_from_logits
from rbm.utils.progress import Progress


def trainer_of(graph, classes: int = 3, *, setting: str = "transductive", **options) -> TreesTrainer:
    split = split_graph(graph, setting, unseen_fraction=0.4)
    logits = torch.randn(graph.num_nodes, classes, generator=torch.Generator().manual_seed(3))
    config = TreesConfig(**{"max_epochs": 6, "leaves": 4, "depth": 3, "min_samples": 1, **options})
    return TreesTrainer(split, outputs_from_logits(logits, split), config, None, classes=classes, seed=5)


def plain(graph, labels, nodes, rounds: int):
    model = HistGradientBoostingClassifier(
        max_iter=rounds, max_leaf_nodes=4, max_depth=3, min_samples_leaf=1, early_stopping=False, random_state=5
    )
    return model.fit(graph.x[nodes].numpy(), labels[nodes].numpy())


@pytest.mark.parametrize("targets", ["labels", "teacher"])
def test_answers_are_those_of_scikit_learn(small_graph, targets):
    ours = trainer_of(small_graph, targets=targets)
    labels, nodes = small_graph.y, small_graph.train_mask.nonzero().flatten()
    if targets == "teacher":
        soft = torch.randn(60, 3, generator=torch.Generator().manual_seed(3)).argmax(-1)
        labels, nodes = torch.where(small_graph.train_mask, labels, soft), torch.arange(60)
    for epoch in range(4):
        ours.train_epoch(epoch)
    theirs = plain(small_graph, labels, nodes, 4)
    expected = torch.from_numpy(theirs.decision_function(small_graph.x.numpy())).float()
    torch.testing.assert_close(ours._logits(), expected, atol=1e-5, rtol=1e-5)
    kept = ours.model.trimmed(4, _nodes_of(ours.model, 4))
    torch.testing.assert_close(kept(small_graph.x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kept(small_graph.x.to_sparse_csr()), expected, atol=1e-5, rtol=1e-5)
    used = sum(len(tree.nodes) for round_of in theirs._predictors for tree in round_of)
    assert kept.nodes == used, "no node of a tree is lost, and none is carried along"
    fewer = ours.model.trimmed(2, _nodes_of(ours.model, 2))
    assert fewer.nodes == sum(len(tree.nodes) for round_of in theirs._predictors[:2] for tree in round_of)
    expected = torch.from_numpy(plain(small_graph, labels, nodes, 2).decision_function(small_graph.x.numpy())).float()
    torch.testing.assert_close(fewer(small_graph.x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_the_loss_is_that_of_the_labelled_nodes(small_graph, setting):
    """Of the rounds so far, in a run whose labelled nodes are anywhere among all nodes."""
    for name in ("train_mask", "val_mask", "test_mask"):
        small_graph[name] = small_graph[name].roll(31)
    ours = trainer_of(small_graph, setting=setting)
    for epoch in range(2):
        loss = ours.train_epoch(epoch)
        nodes = ours.split.observed_nodes[ours.split.observed.train_mask]
        logits = ours.model.trimmed(epoch + 1, _nodes_of(ours.model, epoch + 1))(small_graph.x)
        assert loss == pytest.approx(cross_entropy(logits[nodes], small_graph.y[nodes]).item(), rel=1e-5)


def test_a_student_of_the_best_round_and_its_encodings(small_graph, monkeypatch):
    """scikit-learn grows a few rounds ahead, but none after the last epoch; the student has none after the best one."""
    monkeypatch.setattr(trees, "_ROUNDS_AT_ONCE", 2)
    split, codes = split_graph(small_graph), torch.randn(60, 4)
    config = Config().updated({"seed": 7, "trees": {"max_epochs": 5, "leaves": 4, "depth": 3, "min_samples": 1}})
    outputs = outputs_from_logits(torch.randn(60, 3), split)
    asked = {config.encoding: Encodings(codes, codes)}
    task = DistillationTask(split, outputs, config, 3, asked.get, None, Progress(None))

    def fit(phase, trainer, network):
        grown = []
        for epoch in range(network.max_epochs):
            trainer.train_epoch(epoch)
            grown.append(trainer.boosting.n_iter_)
        assert (trainer.boosting.random_state, grown) == (7, [2, 2, 4, 4, 5])
        return {"best_epoch": 1, "epochs": 5}

    monkeypatch.setattr(task, "fit", fit)
    found = train_trees(task)
    assert found.encodings is asked[config.encoding]
    small_graph.x = torch.cat([small_graph.x, codes], dim=1)
    soft = torch.where(small_graph.train_mask, small_graph.y, outputs.soft_labels.argmax(-1))
    expected = plain(small_graph, soft, torch.arange(60), 2).decision_function(small_graph.x.numpy())
    torch.testing.assert_close(found.student(small_graph.x), torch.from_numpy(expected).float(), atol=1e-5, rtol=1e-5)


def test_settings_are_those_of_the_section(small_graph):
    ours = trainer_of(small_graph, lr=0.3, leaves=5, depth=2, min_samples=3, l2=0.7)
    expected = {"learning_rate": 0.3, "max_leaf_nodes": 5, "max_depth": 2, "min_samples_leaf": 3}
    expected |= {"l2_regularization": 0.7, "random_state": 5, "early_stopping": False, "warm_start": True}
    assert expected.items() <= ours.boosting.get_params().items()


def test_columns_that_no_tree_splits_are_left_out_and_change_nothing(small_graph, monkeypatch):
    """Columns 0 and 5 are constant, and column 7 has too few other rows; column 9 has just enough."""
    x = small_graph.x.clone()
    x[:, [0, 5, 7, 9]] = 1.0
    x[:3, 7], x[:4, 9] = 2.0, 2.0
    small_graph.x = x

    def grown():
        ours = trainer_of(small_graph, min_samples=4)
        for epoch in range(6):
            ours.train_epoch(epoch)
        return ours

    ours = grown()
    assert ours.columns.tolist() == [1, 2, 3, 4, 6, 8, 9, 10, 11]
    assert trees.splittable_columns(np.ones((6, 3), dtype=np.float32), 2).tolist() == [0]
    monkeypatch.setattr(trees, "splittable_columns", lambda rows, fewest: np.arange(rows.shape[1]))
    all_columns = grown()
    assert all_columns.boosting.n_features_in_ == 12
    for name, tensor in ours.model.state_dict().items():
        assert torch.equal(tensor, all_columns.model.state_dict()[name]), name


def test_two_classes_have_one_tree_a_round(small_graph):
    small_graph.y = small_graph.y % 2 * 2  # class 1 has no labels
    ours = trainer_of(small_graph, targets="labels")
    for epoch in range(3):
        ours.train_epoch(epoch)
    theirs = plain(small_graph, small_graph.y, small_graph.train_mask.nonzero().flatten(), 3)
    expected = torch.from_numpy(theirs.predict_proba(small_graph.x.numpy())).float()
    found = ours._logits().softmax(-1)
    assert ours.model.roots.shape == (6,)
    torch.testing.assert_close(found[:, [0, 2]], expected, atol=1e-5, rtol=1e-4)
    assert (found[:, 1] < 1e-6).all()


def test_a_single_class_is_no_error(small_graph):
    small_graph.y = torch.ones_like(small_graph.y)
    ours = trainer_of(small_graph, targets="labels")
    ours.train_epoch(0)
    assert (ours._logits().argmax(-1) == 1).all()
    assert ours.model.trimmed(1, _nodes_of(ours.model, 1))(small_graph.x).argmax(-1).eq(1).all()


@pytest.mark.parametrize(
    ("options", "leaves"),
    [
        ({"min_samples": 1}, 60),
        ({"min_samples": 7}, 8),
        ({"depth": 2}, 4),
        ({"leaves": 3}, 3),
        ({"min_samples": 99}, 2),
    ],
)
def test_memory_follows_the_nodes_of_the_graph(small_graph, options, leaves):
    ours = trainer_of(small_graph, **{"leaves": 2**15, "depth": 100, **options})
    assert ours.model.nodes == 6 * 3 * (2 * leaves - 1)
    for epoch in range(6):
        ours.train_epoch(epoch)
    assert max(ours.node_counts) <= ours.model.nodes
    kept = ours.model.trimmed(6, _nodes_of(ours.model, 6))
    torch.testing.assert_close(kept(small_graph.x), ours._logits())


@pytest.mark.parametrize("at_once", [1, 3, 10])
def test_a_round_has_the_same_bits_when_it_is_grown_again(small_graph, monkeypatch, at_once):
    monkeypatch.setattr(trees, "_ROUNDS_AT_ONCE", at_once)
    ours, resumed = trainer_of(small_graph), trainer_of(small_graph)
    for epoch in range(4):
        ours.train_epoch(epoch)
    resumed.resume_at(4)
    assert torch.equal(ours._logits(), resumed._logits()), "no epoch takes the time of the rounds before it"
    ours.train_epoch(4)
    resumed.train_epoch(4)
    assert torch.equal(ours._logits(), resumed._logits())
    monkeypatch.setattr(trees, "_ROUNDS_AT_ONCE", 1)
    single = trainer_of(small_graph)
    single.resume_at(5)
    assert torch.equal(ours._logits(), single._logits()), "it does not matter how many are grown at once"
    assert all(
        torch.equal(a, b)
        for a, b in zip(ours.model.state_dict().values(), resumed.model.state_dict().values(), strict=True)
    )


def test_thresholds_in_single_precision_send_every_row_the_same_way():
    thresholds = np.random.default_rng(0).normal(size=1000)
    rounded = _rounded_down(thresholds)
    rows = np.concatenate(
        [rounded, np.nextafter(rounded, np.float32(np.inf)), np.nextafter(rounded, np.float32(-np.inf))]
    )
    doubles = np.tile(thresholds, 3)
    np.testing.assert_array_equal(rows <= np.tile(rounded, 3), rows.astype(np.float64) <= doubles)


def test_rows_of_any_rank_as_for_other_students(small_graph):
    trainer = trainer_of(small_graph)
    trainer.train_epoch(0)
    x, student = small_graph.x[:6], trainer.model
    logits = student(x)
    torch.testing.assert_close(student(x[0]), logits[0])
    torch.testing.assert_close(student(x.unflatten(0, (2, 3))), logits.unflatten(0, (2, 3)))
    assert student(x.new_empty(0, 3, x.shape[1])).shape == (0, 3, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_rows_of_numpys_types_are_told(dtype):
    student = TreesStudent(4, 3, rounds=1, outputs=1, nodes=1, depth=1)
    with pytest.raises(TypeError, match=f"rows of x have dtype {dtype}, expected torch.float32, that of the student"):
        student(torch.ones(2, 4, dtype=dtype))


def test_rows_of_another_width_are_told():
    student = TreesStudent(4, 3, rounds=1, outputs=3, nodes=3, depth=1)
    with pytest.raises(ValueError, match=r"hold 5 numbers .*expected 4: 4 features"):
        student(torch.zeros(2, 5))


def test_the_student_has_the_rounds_up_to_the_selected_one(small_graph, quick):
    found = rbm.distill(small_graph, config=quick, methods=["trees"], labels_alone=False, measure_latency=False)
    assert found.student.rounds == found.summary["trees"]["best_epoch"] + 1


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_precision_judges_the_selected_round_by_the_last_one(precision, small_graph, quick, monkeypatch):
    """Mixed precision judges a restored model again, but a trainer of trees has the scores of its last round."""
    real = TreesTrainer.evaluate

    def evaluate(self):
        found = real(self)
        return found._replace(val=1.0 if self.rounds == 2 else 0.5)

    monkeypatch.setattr(TreesTrainer, "evaluate", evaluate)
    config = quick.updated({"precision": precision, "trees": {"max_epochs": 4}})
    logits = torch.zeros(small_graph.num_nodes, 3)
    found = rbm.distill(small_graph, logits, config=config, methods=["trees"], measure_latency=False).summary["trees"]
    assert (found["best_epoch"], found["val_accuracy"]) == (1, 1.0)
