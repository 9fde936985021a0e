"""Compiled layers: one decoder layer of each kind as machine code of its own, made once and kept on disk.

A layer is traced into two graphs of plain tensor operations: forward, and recompute with backward. TorchInductor fuses
and compiles them ahead of time. A trial against the eager layer decides whether the result is used. A second pair of
graphs (`kept`) keeps products from forward to backward.
"""
