"""One file for each distillation method."""
