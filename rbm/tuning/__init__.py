"""The search for good settings on validation nodes: ``rbm tune``, and :func:`rbm.tuning.run.tune` in Python."""
