"""The container runtime as we call it: its CRI client, its lists, and its events."""
