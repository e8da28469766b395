"""Read the cluster agent's files with objects of the API server: the daemon never waits for the server."""
