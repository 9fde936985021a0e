"""The messages of Tinker's API; see v1."""
