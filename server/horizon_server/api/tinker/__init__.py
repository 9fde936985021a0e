"""Tinker's API below /api/v1, as the `tinker` package calls it: training loops on a laptop, the model here.

A Tinker model is a session, a future a call of one, a checkpoint one of its checkpoints: what is kept besides them is
samples that wait. What each call means here is in docs/tinker.md.
"""
