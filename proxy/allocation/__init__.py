"""PURE. Choose the CPUs, memory and devices of a request, under topology hints and policies."""
