"""The engine against what one would run instead. The bench is `python -m bench.peers`; each peer is a process with an
environment of its own, which imports nothing of horizon."""
