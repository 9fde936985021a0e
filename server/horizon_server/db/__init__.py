"""SQLite behind SQLAlchemy: tables, repositories, migrations."""
