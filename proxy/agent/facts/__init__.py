"""Read facts for the daemon from the API server with watches, and leave them in files."""
