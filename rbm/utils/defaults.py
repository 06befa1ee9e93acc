"""Defaults that the layers, the students and the configuration share."""

NUM_EXPERTS = 8
TOP_K = 3
