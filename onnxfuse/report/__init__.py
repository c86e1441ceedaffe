"""What was done and found, told on the terminal, as JSON, and as one HTML page."""
