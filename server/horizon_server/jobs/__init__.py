"""What becomes of a submitted job: its journal, the queue, its attempts, and its files. Knows no wire."""
