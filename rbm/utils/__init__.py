"""Files, caches, progress bars, processes: what every other room stands on. Nothing here knows a model."""
