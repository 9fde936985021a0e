"""The RAM-centric streaming engine. Knows tensors only: no job, user, wire or database."""
