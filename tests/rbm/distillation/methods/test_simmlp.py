"""SimMLP: alignment with the graph view, reconstruction, and a head on fixed rows."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rbm.config import Config, SimMLPConfig
from rbm.distillation.methods import simmlp
from rbm.distillation.methods.simmlp import AlignmentTrainer, HeadTrainer, alignment_loss, masked, train_simmlp
from rbm.distillation.task import DistillationTask
from rbm.nn.dropout import dropout
from rbm.nn.reconstruction import SparseTarget
from rbm.nn.simmlp import SimMLPStudent
from rbm.nn.sparse_rows import SparseRows
from rbm.utils.progress import Progress

SMALL = {"hidden_channels": 8, "predictor_channels": 5, "norm": "layer", "dropout": 0.0, "max_epochs": 9}


def trainer_of(split, **options) -> AlignmentTrainer:
    config = SimMLPConfig(**{**SMALL, **options})
    return AlignmentTrainer(SimMLPStudent(6, 8, 4, num_layers=config.num_layers, norm="layer"), split, config)


def plain_mlp(module, x, *, residual=False):
    for i, (layer, norm) in enumerate(zip(module.layers, module.norms, strict=True)):
        z = norm(x @ layer.weight.T + layer.bias)
        if i < len(module.layers) - 1:
            z = torch.where(z > 0, z, module.activation.weight * z)
        x = z + x if residual and i > 0 else z
    return x / x.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("power", [1.0, 3.0])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_loss_and_gradient_equal_the_papers(split, power, layers):
    ours = trainer_of(split, power=power, reconstruction_weight=4.0, num_layers=layers, propagation_layers=layers)
    x, count = split.observed.x, split.observed.num_nodes
    adjacency = torch.eye(count)
    for u, v in split.observed.edge_index.T.tolist():
        if u != v:
            adjacency[v, u] += 1
    degrees = adjacency.sum(1)
    adjacency = adjacency / (degrees[:, None] * degrees[None, :]).sqrt()
    z = plain_mlp(ours.model.encoder, x, residual=True)
    h = z
    for norm in ours.aggregator.norms:
        h = adjacency @ h
        h = norm(torch.where(h > 0, h, ours.aggregator.activation.weight * h))
    rho, d = plain_mlp(ours.predictor, z), plain_mlp(ours.decoder, h)
    cosine = (rho * h.detach()).sum(1) / rho.norm(dim=1) / h.detach().norm(dim=1)
    expected = ((1 - cosine) ** power).mean() + 4.0 * ((d - x) ** 2).mean()
    self_loops = split.observed.edge_index[0] == split.observed.edge_index[1]
    kept = split.observed.edge_index[:, ~self_loops]
    from rbm.teachers import GCN

    found = ours.loss(x, GCN.adjacency(kept, count))
    torch.testing.assert_close(found, expected)
    parameters = [*ours.model.encoder.parameters(), *ours.auxiliary_modules.parameters()]
    gradients = [torch.autograd.grad(loss, parameters, materialize_grads=True) for loss in (found, expected)]
    for mine, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_equal_rows_have_a_finite_gradient(power):
    rows = torch.eye(3, 4, requires_grad=True)
    loss = alignment_loss(rows, torch.tensor([[2.0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]), power)
    loss.backward()
    assert loss.item() == pytest.approx(1 / 3, abs=1e-3)
    assert rows.grad.isfinite().all()


def test_sparse_features_are_found_again_as_dense_ones_are(split):
    dense = trainer_of(split, reconstruction_weight=4.0)
    sparse = copy.deepcopy(dense)
    sparse.rows = SparseRows(dense.rows.to_sparse_csr())
    sparse.target = SparseTarget(sparse.rows)
    edges = dense.draw_edges()
    losses = [trainer.loss(trainer.rows, edges) for trainer in (dense, sparse)]
    torch.testing.assert_close(*losses)
    gradients = [
        torch.autograd.grad(loss, [*trainer.model.encoder.parameters(), *trainer.auxiliary_modules.parameters()])
        for loss, trainer in zip(losses, (dense, sparse), strict=True)
    ]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_no_gradient_flows_into_what_is_seen():
    seen = torch.randn(5, 3, requires_grad=True)
    predicted = torch.randn(5, 3, requires_grad=True)
    alignment_loss(predicted, seen, 2.0).backward()
    assert seen.grad is None
    assert predicted.grad is not None
    torch.testing.assert_close(alignment_loss(seen, 3 * seen, 1.0), torch.tensor(0.0), atol=1e-6, rtol=0)
    rows = torch.randn(1000, 3)  # some cosines are a little above one
    assert alignment_loss(rows, 3 * rows, 1.5).isfinite()


def test_the_alignment_trains_all_but_the_head_as_the_settings_ask(split):
    ours = trainer_of(split, lr=0.02, weight_decay=0.03, predictor_dropout=0.4, reconstruction_weight=4.0)
    assert (ours.predictor.dropout, {type(norm) for norm in ours.predictor.norms}) == (0.4, {nn.LayerNorm})
    assert isinstance(ours.optimizer, torch.optim.AdamW)
    parts = ours.model, ours.aggregator, ours.predictor, ours.decoder
    before = copy.deepcopy([part.state_dict() for part in parts])
    ours.train_epoch(0)
    assert [(group["lr"], group["weight_decay"]) for group in ours.optimizer.param_groups] == [(0.02, 0.03)]
    for part, former in zip(parts, before, strict=True):
        for name, tensor in part.named_parameters():
            assert torch.equal(tensor, former[name]) == name.startswith("head"), name
    plain = trainer_of(split, predictor_layers=1, reconstruction_weight=0.0)
    assert (type(plain.predictor), plain.decoder) == (nn.Linear, None)
    plain.train_epoch(0)


def test_graph_view_and_predictor_have_the_layers_of_the_settings(split):
    ours = trainer_of(split, propagation_layers=3, predictor_layers=4, predictor_channels=5, norm="batch")
    assert len(ours.aggregator.norms) == 3
    assert all(isinstance(norm, nn.BatchNorm1d) for norm in [*ours.aggregator.norms, *ours.predictor.norms])
    sizes = [(layer.in_features, layer.out_features) for layer in ours.predictor.layers]
    assert sizes == [(8, 5), (5, 5), (5, 5), (5, 8)]


def test_dropout_follows_every_activation_in_training_alone():
    student, x = SimMLPStudent(6, 8, 4, num_layers=3, norm="none", dropout=0.5), torch.randn(20, 6)
    encoder = student.encoder
    torch.manual_seed(3)
    found = encoder(x)
    torch.manual_seed(3)
    first, second, last = encoder.layers
    z = dropout(encoder.activation(first(x)), 0.5)
    z = dropout(encoder.activation(second(z)), 0.5) + z
    torch.testing.assert_close(found, F.normalize(last(z) + z))
    student.eval()
    torch.testing.assert_close(encoder(x), plain_mlp(encoder, x, residual=True))


def test_masks_leave_out_single_numbers():
    rows = torch.rand(200, 50) + 1
    dense = masked(rows, 0.75)
    assert ((dense == 0) | (dense == rows)).all(), "what stays is not scaled"
    assert abs((dense == 0).float().mean() - 0.75) < 0.02
    sparse = masked(SparseRows(rows.to_sparse_csr(), rows), 0.25).to_dense()
    both = torch.cat([rows, rows], dim=1)
    assert ((sparse == 0) | (sparse == both)).all()
    assert abs((sparse == 0).float().mean() - 0.25) < 0.02
    assert masked(rows, 0) is rows


def test_edges_are_drawn_and_the_rate_falls(split, monkeypatch):
    ours, drawn = trainer_of(split, edge_mask=0.5), []
    monkeypatch.setattr(ours, "loss", lambda rows, adjacency: drawn.append(adjacency) or ours.model.head.weight.sum())
    rates = []
    for epoch in range(9):
        ours.train_epoch(epoch)
        rates.append(ours.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.001 * (1 + math.cos(math.pi * epoch / 9)) / 2 for epoch in range(9)])
    sizes = {adjacency.values().numel() for adjacency in drawn}
    assert len(sizes) > 1
    assert max(sizes) < split.observed.num_nodes + split.observed.num_edges


def test_features_and_edges_are_left_out_by_shares_of_their_own(split, monkeypatch):
    for shares in ((0.9, 0.1), (0.1, 0.9)):
        ours, seen = trainer_of(split, feature_mask=shares[0], edge_mask=shares[1]), []
        monkeypatch.setattr(ours, "loss", lambda *given, seen=seen: seen.append(given))
        for epoch in range(20):
            ours.epoch_loss(epoch)
        count = split.observed.num_nodes
        kept_numbers = sum((rows != 0).float().mean() for rows, _ in seen) / 20
        # Without self-loops, of which every node has one.
        kept_edges = sum((adjacency.to_dense() != 0).sum() - count for _, adjacency in seen) / 20
        assert kept_numbers == pytest.approx(1 - shares[0], abs=0.08)
        assert (kept_edges > split.observed.edge_index.shape[1] / 2) == (shares[1] < 0.5)


def test_no_label_moves_the_alignment_and_the_head_moves_nothing_else(split):
    ours, other = trainer_of(split), None
    other = copy.deepcopy(ours)
    other.split.observed.y.mul_(0)
    for trainer in (ours, other):
        torch.manual_seed(1)
        trainer.train_epoch(0)
    for mine, theirs in zip(ours.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    encoder = copy.deepcopy(ours.model.encoder.state_dict())
    ours.model.train().encoder.dropout = 0.5  # the rows of the head are those without dropout
    head = HeadTrainer(ours.model, ours.split, SimMLPConfig(head_lr=0.1, weight_decay=0.3, head_weight_decay=0.02))
    assert isinstance(head.optimizer, torch.optim.AdamW)
    assert [(group["lr"], group["weight_decay"]) for group in head.optimizer.param_groups] == [(0.1, 0.02)]
    x, y, nodes = ours.split.observed.x, ours.split.observed.y, ours.split.observed.train_mask
    ours.model.eval()
    expected = F.cross_entropy(ours.model(x)[nodes], y[nodes]).item()
    assert head.train_epoch(0) == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(tensor, encoder[name]) for name, tensor in ours.model.encoder.state_dict().items())
    assert head.train_epoch(1) < expected


def test_the_head_follows_the_alignment_with_limits_of_its_own(split, teacher_outputs, monkeypatch):
    options = {"max_epochs": 9, "patience": 4, "min_epochs": 2, "head_epochs": 60, "head_patience": 30}
    config = Config().updated({"simmlp": options})
    task = DistillationTask(split, teacher_outputs, config, 4, lambda section: None, None, Progress(None))
    limits, found = {}, {"val_accuracy": 0.5, "test_accuracy": 0.4, "test_max": 0.6, "best_epoch": 3, "epochs": 7}

    def fit(phase, trainer, network):
        limits[phase] = network.max_epochs, network.patience, network.min_epochs
        if phase == "simmlp":
            assert not trainer.model.head.bias.any()
            torch.manual_seed(config.seed + 1_000_003)  # whatever was drawn before
            assert torch.equal(trainer.model.head.weight, nn.init.xavier_uniform_(torch.empty(4, 512)))
        return found

    monkeypatch.setattr(task, "fit", fit)
    assert train_simmlp(task).result == found | {"best_epoch": 10, "epochs": 14}
    assert limits == {"simmlp-alignment": (9, 4, 2), "simmlp": (60, 30, 0)}


def test_an_epoch_is_judged_by_the_nearest_mean(split):
    ours = trainer_of(split)
    ours.model.eval()
    with torch.no_grad():
        rows = ours.model.encoder(split.graph.x)
        labelled = split.observed_nodes[split.observed.train_mask]
        means = torch.stack([rows[labelled][split.graph.y[labelled] == label].mean(0) for label in range(4)])
        scores = F.normalize(rows) @ F.normalize(means.nan_to_num()).T
    tested = split.unseen_nodes if len(split.unseen_nodes) else split.graph.test_mask
    found = ours.evaluate()
    assert found.test == pytest.approx((scores[tested].argmax(1) == split.graph.y[tested]).float().mean().item())


def test_no_node_is_judged_to_be_of_a_class_without_labelled_nodes(split, monkeypatch):
    observed, scores = split.observed, []
    observed.y = observed.y.where(~observed.train_mask | (observed.y != 3), 0)
    monkeypatch.setattr(simmlp, "split_accuracies", lambda _, full, __: scores.append(full))
    trainer_of(split).evaluate()
    assert torch.isneginf(scores[0][:, 3]).all()
    assert scores[0][:, :3].isfinite().all()
