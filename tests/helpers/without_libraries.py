"""Use a package built with ``RBM_BUILD=none`` in a separate process; the first argument is an empty folder.

Prints the folders of the packages.
"""

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import rbm
import rbm_kernels
from rbm.cli import app
from rbm_kernels import _dispatch, _native


def info() -> None:
    """Nothing is missing, and ``rbm info`` reports the build."""
    reason = "this package was built without compiled libraries (RBM_BUILD=none)"
    assert {name: entry["reason"] for name, entry in _native.status().items()} == {"cpu": reason, "cuda": reason}
    assert {by["CPU"] for by in _dispatch.implementations().values()} == {"reference (eager PyTorch)"}
    shown = CliRunner().invoke(app, ["info"])
    assert shown.exit_code == 0, shown.output
    assert "No compiled libraries: eager PyTorch serves every operator" in shown.output


def operators() -> None:
    """The layer's formula (paper, Eq. 3 and 5), its gradient, sparse rows, the memory update (Eq. 4)."""
    x, memory = torch.randn(7, 6, dtype=torch.double), torch.randn(4, 6, dtype=torch.double)
    weight = torch.randn(4, 5, 6, dtype=torch.double, requires_grad=True)
    cosines = torch.nn.functional.cosine_similarity(x[:, None], memory[None], dim=-1)
    top = cosines.topk(2)
    gates, experts, _ = rbm_kernels.cosine_topk(x, memory, 2)
    torch.testing.assert_close(gates, top.values.softmax(-1))
    assert torch.equal(experts.long(), top.indices)
    expected = torch.einsum("bk,bknd,bd->bn", gates, weight[experts.long()], x)
    torch.testing.assert_close(rbm_kernels.expert_matmul(x, weight, None, gates, experts), expected)
    torch.testing.assert_close(rbm_kernels.routed_matmul(x, memory, weight, None, 2), expected)
    rows = x.to_sparse_csr()
    parts = (rows.crow_indices().int(), rows.col_indices().int(), rows.values())
    sparse = rbm_kernels.sparse_expert_matmul(*parts, weight, None, None, gates, experts)
    torch.testing.assert_close(sparse, expected)
    (got,) = torch.autograd.grad(sparse.square().sum(), weight)
    (wanted,) = torch.autograd.grad(expected.square().sum(), weight)
    torch.testing.assert_close(got, wanted)
    weighted_sum, total = rbm_kernels.memory_statistics(x, gates, experts, 4)
    shares = torch.zeros(7, 4, dtype=torch.double).scatter(1, experts.long(), gates.exp())
    torch.testing.assert_close(total, shares.sum(0))
    torch.testing.assert_close(weighted_sum, shares.T @ torch.nn.functional.normalize(x))
    refusals(x, weight.detach(), gates, experts, parts)


def refusals(x, weight, gates, experts, parts) -> None:
    """An index out of range is reported, and no memory outside the tensor is read."""
    far, (crow, col, values) = experts + 1_000_000, parts
    message = r"experts holds 100000\d in row 0, expected between 0 and 3"
    for call in (
        lambda: rbm_kernels.expert_matmul(x, weight, None, gates, far),
        lambda: rbm_kernels.memory_statistics(x, gates, far, 4),
        lambda: rbm_kernels.expert_order(far, 4, 16),
        lambda: rbm_kernels.sparse_expert_matmul(*parts, weight, None, None, gates, far),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    with pytest.raises(RuntimeError, match=r"more than 2\^63 sets of up to 60 of 128 experts"):
        rbm_kernels.expert_order(torch.arange(60, dtype=torch.int32)[None], 128, 16)
    for op in (torch.ops.rbm.sparse_expert_matmul_backward_gates, torch.ops.rbm.sparse_expert_matmul_backward_weight):
        bias = (None,) if op.__name__.endswith("gates") else ()
        grad = torch.ones(7, 5, dtype=torch.double)
        with pytest.raises(RuntimeError, match="col holds -1, expected between 0 and 5"):
            op(grad, crow, col * 0 - 1, values, weight, *bias, None, gates, experts)
        with pytest.raises(RuntimeError, match="crow does not rise from 0 to the number of entries, 42"):
            op(grad, crow + 1_000_000, col, values, weight, *bias, None, gates, experts)


def layer() -> None:
    """The layer learns, and has the same outputs in eval mode as in training mode."""
    layer = rbm.FusedRbMLayer(6, 3, num_experts=4, top_k=2)
    x, y = torch.randn(64, 6), torch.arange(64) % 3
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(layer(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses
    with torch.no_grad():
        training = layer.eval().train()(x)  # in training mode, the memory is updated after the output
    with torch.inference_mode():
        assert layer.eval()(x).shape == training.shape


def distill(folder: Path) -> None:
    """Run ``rbm distill`` and ``rbm predict`` from the shell."""
    few = [f"{name}.max_epochs=2" for name in ("teacher", "mlp", "rbm")] + ["rbm.pretrain_epochs=1"]
    settings = [word for setting in few for word in ("--set", setting)]
    run = folder / "run"
    done = CliRunner().invoke(
        app, ["distill", "--features-only", "--no-plots", "--method", "rbm", "--out", str(run), *settings]
    )
    assert done.exit_code == 0, done.output
    features, out = folder / "x.csv", folder / "out.csv"
    features.write_text("\n".join(",".join(["0.5"] * 64) for _ in range(3)) + "\n")
    done = CliRunner().invoke(app, ["predict", str(run), str(features), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert len(out.read_text().splitlines()) == 4


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    info()
    operators()
    layer()
    distill(Path(sys.argv[1]))
    print(Path(rbm.__file__).parent.parent, Path(rbm_kernels.__file__).parent.parent)
