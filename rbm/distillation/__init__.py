"""From a teacher's outputs to students."""
