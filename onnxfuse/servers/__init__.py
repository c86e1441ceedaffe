"""What inference servers need beside an engine."""
