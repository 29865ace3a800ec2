"""What the service must remember, in one SQLite database."""
