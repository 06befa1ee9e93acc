"""The students that the paper compares RbM with: one file each, to be read from top to bottom."""
