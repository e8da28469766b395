"""The cluster agent: a separate process that publishes the state of the daemon at the API server."""
