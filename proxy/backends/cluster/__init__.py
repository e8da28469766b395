"""What the cluster agent has read from the API server, in files: the daemon never waits for it."""
