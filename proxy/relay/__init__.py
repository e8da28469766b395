"""PURE. The HTTP/2 frame session: bytes in, bytes out; knows methods by path, knows no CRI."""
