"""Protocols in front of the engine: the CRI, and Koordinator's hook server."""
