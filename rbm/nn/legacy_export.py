"""A clear error of ``torch.onnx.export(..., dynamo=False)``, PyTorch's deprecated exporter."""

from typing import Any

from rbm_kernels._onnx import is_exporting


class OneInput:
    """Mixin for a module whose ``forward`` takes one positional argument.

    If the module itself is exported, the deprecated exporter passes keyword arguments by position, which ends in a
    TypeError before ``forward``. PyTorch calls this method in place of ``forward`` only while TorchScript traces.
    """

    def _slow_forward(self, *inputs: Any, **options: Any) -> Any:
        if len(inputs) > 1:
            is_exporting()  # raises
        return super()._slow_forward(*inputs, **options)
