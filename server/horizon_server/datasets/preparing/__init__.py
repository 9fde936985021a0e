"""The preparation of a dataset for a model: its key, its child process, and the tokens on disk."""
