"""PURE. Relay one HTTP/2 connection: bytes in, bytes out; knows methods by path, and nothing of the CRI."""
