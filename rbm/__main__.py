"""``python -m rbm`` is the command line, as ``torchrun -m rbm`` needs it."""

from rbm.cli import main

if __name__ == "__main__":
    main()
