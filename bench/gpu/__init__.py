"""The stages of `python -m bench.gpu_all`: one module each with a `run(task, report)`, and what they share."""
