"""The distillation methods, one file each."""
