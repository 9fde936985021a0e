"""What client and server share besides the contract: what a data file and a model folder are, what can be wrong with
them, what other tools call the fields of a job, what trackers are given of a job, and how each error is reported.

Standard library only, so that the client stays light. Parquet and zstd need Arrow, which only the server has: it
extends `files.DataFile` with both.
"""
