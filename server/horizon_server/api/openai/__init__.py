"""OpenAI's API below /v1: files, fine-tuning jobs, models, completions and chats, as the `openai` package calls them.

A file is a dataset, a fine-tuning job a job, a model a pushed model or a checkpoint: nothing is kept besides them. What
each field means here is in docs/openai.md.
"""
