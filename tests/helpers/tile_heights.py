"""Tiles of the grouped matmul as for another number of rows."""

import pytest

from rbm_kernels.ops.expert_matmul import config


def set_tile_rows(monkeypatch: pytest.MonkeyPatch, height: int) -> None:
    """Tiles and slices of this height for any number of rows; at 128, weights are padded as for many rows."""
    monkeypatch.setattr(config, "tile_rows", lambda rows, precision="half": height)
    monkeypatch.setattr(config, "slice_rows", lambda rows: height)
    monkeypatch.setattr(config, "MANY_ROWS", 0 if height == 128 else config.MANY_ROWS)
