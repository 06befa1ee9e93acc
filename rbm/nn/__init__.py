"""Layers, students and losses. Usable without the rest of the package."""
