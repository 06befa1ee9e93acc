"""Files, caches, progress bars, processes. All other folders import from this one, which imports from none of them."""
