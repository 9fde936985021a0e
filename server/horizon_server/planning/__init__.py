"""How much memory a job needs and how long it takes, computed before anything is allocated. Loads no torch."""
