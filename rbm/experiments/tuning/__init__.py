"""Search for hyperparameters on validation nodes."""
