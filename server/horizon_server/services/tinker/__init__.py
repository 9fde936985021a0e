"""What Tinker's API needs besides sessions: names of its models and checkpoints, and samples that wait."""
