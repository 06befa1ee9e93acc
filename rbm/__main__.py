"""``python -m rbm`` is the command line, as ``torchrun -m rbm`` needs it."""

from .cli import main

main()
