"""What a user submits and what becomes of it: state machine, queue, plan, supervisor. Knows no database and no wire."""
