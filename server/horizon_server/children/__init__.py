"""Child processes: the parent's side and the child's side of one protocol."""
