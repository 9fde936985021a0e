"""The SQLite database: tables, what reads and writes them, migrations."""
