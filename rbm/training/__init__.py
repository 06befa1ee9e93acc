"""Training of one network: the epoch loop, accuracies, and the run folder."""
