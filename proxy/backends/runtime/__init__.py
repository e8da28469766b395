"""A client of the container runtime: CRI calls, lists, and events."""
