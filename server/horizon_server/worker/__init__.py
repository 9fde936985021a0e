"""The child process of one attempt: spec in, events out. The only place that joins spec and engine."""
