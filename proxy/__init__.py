"""topoproxy: a transparent CRI proxy that places containers on CPUs and memory nodes."""

__version__ = "0.1.0"
