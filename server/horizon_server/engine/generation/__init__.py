"""Answers to prompts from a model whose weights stay on the host: greedy or sampled tokens, with a cache of keys and
values."""
