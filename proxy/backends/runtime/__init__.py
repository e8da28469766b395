"""A client of the container runtime: its CRI, its lists, and its events."""
