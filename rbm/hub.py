"""Loading students from the Hugging Face Hub under the name that model cards print: see :mod:`rbm.nn.pretrained`."""

from rbm.nn.pretrained import HubMixin, load

__all__ = ["HubMixin", "load"]
