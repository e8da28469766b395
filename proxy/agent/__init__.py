"""The cluster agent: publishes the state of the daemon at the API server. A process of its own."""
