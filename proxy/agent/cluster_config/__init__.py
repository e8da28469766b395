"""Settings from the cluster: the agent selects a TopoproxyConfig and leaves it for the daemon."""
