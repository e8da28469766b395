"""Changes the configuration of a running daemon."""
