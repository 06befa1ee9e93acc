"""``rbm distill --auto``: teacher, encodings, student and its decisive settings, chosen on validation nodes."""
