"""What callers can do: one service for each kind of thing. Every call is authorised here."""
