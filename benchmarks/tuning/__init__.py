"""Tuning of tiles: the candidates, the check of their results, and their times."""
