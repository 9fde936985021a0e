"""Users, projects, tokens, and the one place that says who may do what."""
