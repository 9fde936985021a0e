"""Rows of a dataset as a model would see them, rendered in a child process."""
