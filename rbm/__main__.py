"""``python -m rbm`` is the command line, as ``torchrun -m rbm`` needs it."""

from rbm.cli import main

main()
