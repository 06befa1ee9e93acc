"""Fixtures that the whole suite shares."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from torch_geometric.data import Data

REPOSITORY = Path(__file__).resolve().parent.parent

if not torch.cuda.is_available():
    # Triton kernels run in Triton's interpreter. Triton decides when it is imported, and other packages import it too:
    # this must come before any of them.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Folder of the real datasets: ``RBM_DATA_ROOT``, or ``shared/data`` beside the checkout; skips without."""
    root = Path(os.environ.get("RBM_DATA_ROOT", REPOSITORY.parent / "shared" / "data"))
    if not root.is_dir():
        pytest.skip(f"real datasets are not at {root} (RBM_DATA_ROOT names another place)")
    return root


@pytest.fixture(scope="session", autouse=True)
def _own_compile_cache(tmp_path_factory) -> None:
    """torch.compile keeps graphs on disk and does not notice that an operator's derivative has changed since."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small_graph() -> Data:
    """60 nodes in three noisy, well-connected classes: a few epochs separate them."""
    from torch_geometric.data import Data

    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(60) % 3
    x = torch.randn(60, 12, generator=generator) + 3.0 * torch.nn.functional.one_hot(labels, 12)
    same = torch.randint(0, 20, (2, 150), generator=generator) * 3
    pairs = same + torch.randint(0, 3, (1, 150), generator=generator)
    other = torch.randint(0, 60, (2, 20), generator=generator)
    edges = torch.cat([pairs, other], dim=1)
    edges = edges[:, edges[0] != edges[1]]
    edges = torch.cat([edges, edges.flip(0)], dim=1).unique(dim=1)
    position = torch.arange(60)
    return Data(
        x=x,
        edge_index=edges,
        y=labels,
        train_mask=position < 15,
        val_mask=(position >= 15) & (position < 30),
        test_mask=position >= 30,
    )
