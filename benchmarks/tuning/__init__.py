"""Candidate tiles: which there are, whether they are right, how long they take."""
