"""Benchmarks: each compares with a reference in the same run, and prints ratios. See `python -m bench --help`."""
