"""What a data file and a model folder are, and what can be wrong with them: one set of rules for the client and the server. Also what
other tools call the fields of a job.

Standard library only, so that the client stays light. Parquet and zstd need Arrow, which only the server has: it extends
`files.DataFile` with both.
"""
