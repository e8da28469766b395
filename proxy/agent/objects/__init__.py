"""The objects that the agent publishes, as pure functions of the daemon's description of the node."""
