"""The wire contract of horizon; see v1."""
