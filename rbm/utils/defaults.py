"""Defaults shared by the layers, the students and the configuration."""

NUM_EXPERTS = 8
TOP_K = 3
