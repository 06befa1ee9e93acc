"""Whether a program is being exported. In code that ``torch.compile`` traces, torch 2.11 always says yes."""

import pytest
import torch
from torch import Tensor, nn

from rbm_kernels._library import is_exporting


class Tells(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if is_exporting() else x + 2


def test_compiled_code_is_not_exported():
    assert torch.compile(Tells(), backend="eager", fullgraph=True)(torch.zeros(1)) == 2
    assert Tells()(torch.zeros(1)) == 2


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is(strict):
    program = torch.export.export(Tells(), (torch.zeros(1),), strict=strict)
    assert program.module()(torch.zeros(1)) == 1
