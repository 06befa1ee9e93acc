"""An epoch in batches: their sum, and the weight of each."""

import pytest
import torch

from rbm.config import DistillConfig
from rbm.distillation import batches as module
from rbm.distillation.adversarial import pgd_perturb
from rbm.distillation.batches import node_batches, pair_batches
from rbm.distillation.soft_targets import Neighborhood, SoftTargets, weigh_pairs
from rbm.nn import losses

NODES, CLASSES = 25, 4


class Problem:
    """A graph with a teacher, and a student that is a single matrix."""

    def __init__(self, config: DistillConfig) -> None:
        self.config = config
        edges = torch.randint(0, NODES, (2, 60))
        self.graph = Neighborhood(edges, NODES)
        self.labels = torch.randint(0, CLASSES, (NODES,))
        self.train_nodes = torch.randperm(NODES)[:7].sort().values
        self.teacher = losses.log_probabilities(
            torch.randn(NODES, CLASSES, dtype=torch.float64), config.temperature, config.temperature_mode
        )
        self.trust = torch.rand(NODES, dtype=torch.float64)
        self.pairs = weigh_pairs(self.graph, self.trust, mean=config.mean, draw=config.draw)
        self.logits = torch.randn(NODES, CLASSES, dtype=torch.float64)

    def batches(self) -> list:
        if self.config.forward == "pair":
            return list(pair_batches(self.config, self.train_nodes, self.pairs, self.graph))
        return list(node_batches(self.config, self.train_nodes, self.pairs, NODES))

    def soft_loss(self, batch, logits) -> torch.Tensor:
        how = (self.config.temperature, self.config.temperature_mode)
        if batch.sources is None:
            return SoftTargets.of(self.pairs, self.graph, self.teacher).loss(logits, batch.nodes, *how)
        return losses.pair_loss(logits, self.teacher[batch.sources], batch.pair_weights, *how)

    def loss(self, batch) -> torch.Tensor:
        logits = self.logits if batch.nodes is None else self.logits[batch.nodes]
        total = torch.zeros((), dtype=torch.float64)
        if batch.soft_weight is not None:
            total = total + batch.soft_weight * self.soft_loss(batch, logits)
        if batch.labelled is not None:
            nodes = batch.labelled if batch.nodes is None else batch.nodes[batch.labelled]
            total = total + batch.hard_weight * losses.hard_label_loss(logits[batch.labelled], self.labels[nodes])
        return total


@pytest.mark.parametrize("mean", ["nodes", "pairs"])
@pytest.mark.parametrize("forward", ["node", "pair"])
@pytest.mark.parametrize("batch_size", [0, 6, 100])
def test_batches_add_up_to_the_papers_loss(mean, forward, batch_size):
    problem = Problem(DistillConfig(mean=mean, forward=forward, batch_size=batch_size, temperature=0.8))
    config, graph = problem.config, problem.graph
    hard = losses.hard_label_loss(problem.logits[problem.train_nodes], problem.labels[problem.train_nodes])
    soft = SoftTargets.of(problem.pairs, graph, problem.teacher).loss(problem.logits, None, 0.8, "softmax")
    expected = config.label_weight * hard + (1 - config.label_weight) * soft
    batches = problem.batches()
    assert len(batches) > 1 or (forward == "node" and batch_size != 6)
    torch.testing.assert_close(sum(problem.loss(batch) for batch in batches), expected, rtol=1e-12, atol=1e-12)
    assert sum(batch.auxiliary_weight for batch in batches) == pytest.approx(1.0)


@pytest.mark.parametrize("forward", ["node", "pair"])
@pytest.mark.parametrize("batch_size", [5, 6])
def test_an_epoch_ends_in_a_step(forward, batch_size):
    """With one step per epoch, it follows the last batch: earlier, later batches would count for nothing."""
    for step_per_batch in (False, True):
        problem = Problem(DistillConfig(forward=forward, batch_size=batch_size, step_per_batch=step_per_batch))
        *earlier, last = (batch.ends_step for batch in problem.batches())
        assert last
        assert set(earlier) == {step_per_batch}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("forward", ["node", "pair"])
@pytest.mark.parametrize("batch_size", [0, 6])
def test_the_mean_over_ranks_is_the_loss_of_the_batch(monkeypatch, ranks, forward, batch_size):
    problem = Problem(DistillConfig(forward=forward, batch_size=batch_size))
    monkeypatch.setattr(module, "world_size", lambda: ranks)
    for batch in problem.batches():
        parts = []
        for rank in range(ranks):
            of_rank = lambda count, rank=rank: slice(count * rank // ranks, count * (rank + 1) // ranks)  # noqa: E731
            monkeypatch.setattr(module, "local_slice", of_rank)
            parts.append(batch.local_part(NODES, torch.device("cpu")))
        # A rank without labels has no mean of them.
        losses_of_ranks = [problem.loss(part if part.hard_weight else part._replace(labelled=None)) for part in parts]
        torch.testing.assert_close(sum(losses_of_ranks) / ranks, problem.loss(batch), rtol=1e-12, atol=1e-12)
        assert sum(part.share for part in parts) == pytest.approx(ranks)
        rows = torch.arange(NODES) if batch.nodes is None else batch.nodes
        assert torch.cat([part.nodes for part in parts]).tolist() == rows.tolist()


def test_temperature_squared():
    config = DistillConfig(label_weight=0.0, temperature=3.0)
    problem = Problem(config)
    (plain,) = (problem.loss(batch) for batch in problem.batches())
    problem.config = DistillConfig(label_weight=0.0, temperature=3.0, temperature_squared=True)
    (scaled,) = (problem.loss(batch) for batch in problem.batches())
    torch.testing.assert_close(scaled, 9 * plain)


@pytest.mark.parametrize("batch_size", [4, 0])
@pytest.mark.parametrize("forward", ["node", "pair"])
@pytest.mark.parametrize("draw", ["expectation", "sample"])
def test_released_reduction_sums_means_of_batches(forward, batch_size, draw):
    """Seven labels in batches of four give two means; the batches of pairs are also means, and pairs that were not
    drawn are in none. A batch size of 0 stands for the number of nodes.
    """
    how = {"forward": forward, "draw": draw, "batch_size": batch_size, "shuffle": False}
    how["reduction"] = "sum_of_batch_means"
    config, size = DistillConfig(label_weight=0.3, mean="pairs", **how), batch_size or NODES
    problem = Problem(config)
    batches = problem.batches()
    number_of_pairs = NODES + int(problem.pairs.neighbors.count_nonzero())
    hard, soft = -(-7 // size), -(-number_of_pairs // size)
    assert soft > 1
    assert draw == "expectation" or soft < -(-(NODES + len(problem.graph)) // size)
    assert sum(batch.auxiliary_weight for batch in batches) == pytest.approx(hard + soft)
    similarity = sum(batch.similarity_weight for batch in batches if batch.labelled is not None)
    assert similarity == pytest.approx(hard)
    if forward == "pair":
        assert [batch.nodes.tolist() for batch in batches[:hard]] == [
            nodes.tolist() for nodes in problem.train_nodes.split(size)
        ]
        assert all(batch.hard_weight == 0.3 for batch in batches[:hard])
        assert len(batches) == hard + soft
        weights = torch.stack([batch.pair_weights.sum() for batch in batches[hard:]])
        torch.testing.assert_close(weights, torch.ones_like(weights))
    else:
        assert sum(batch.hard_weight for batch in batches) == pytest.approx(0.3 * hard)
        assert batches[0].soft_weight == pytest.approx(0.7 * soft)


@pytest.mark.parametrize("forward", ["node", "pair"])
def test_a_step_a_batch_keeps_the_size_of_the_loss(forward):
    problem = Problem(DistillConfig(forward=forward, batch_size=5, step_per_batch=True))
    batches = problem.batches()
    whole = Problem(DistillConfig())
    whole.__dict__.update({**problem.__dict__, "config": whole.config})
    (expected,) = (whole.loss(batch) for batch in whole.batches())
    mean = sum(problem.loss(batch) for batch in batches) / len(batches)
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
    for name in ("auxiliary_weight", "similarity_weight"):
        assert sum(getattr(batch, name) for batch in batches) / len(batches) == pytest.approx(1.0)


@pytest.mark.parametrize("forward", ["node", "pair"])
def test_shuffling_sees_every_row_once(forward):
    problem = Problem(DistillConfig(forward=forward, batch_size=4))
    first, second = (torch.cat([batch.nodes for batch in problem.batches()]) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)
    problem.config = DistillConfig(forward=forward, batch_size=4, shuffle=False)
    first, second = (torch.cat([batch.nodes for batch in problem.batches()]) for _ in range(2))
    assert torch.equal(first, second)


def test_disturbed_inputs_raise_the_loss_within_their_box():
    x, weight = torch.randn(6, 3), torch.randn(3, requires_grad=True)

    def loss(rows):
        return (rows @ weight).square().sum()

    harder = pgd_perturb(x, loss, eps=0.1, steps=5)
    assert (harder - x).abs().max() <= 0.1 + 1e-6
    assert not harder.requires_grad
    assert weight.grad is None, "the parameters' gradients are left alone"
    random = [loss(x + torch.empty_like(x).uniform_(-0.1, 0.1)).item() for _ in range(20)]
    assert loss(harder).item() > max(random)
    # Each entry can move by at most five quarters of the box, so all can reach its boundary; the best one is known.
    assert loss(harder).item() > 0.9 * loss(x + 0.1 * torch.sign((x @ weight)[:, None] * weight)).item()
