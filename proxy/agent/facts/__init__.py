"""What the daemon is to know from the API server: read by watches, left in files."""
