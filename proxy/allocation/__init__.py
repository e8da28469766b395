"""PURE. Which CPUs and memory nodes a request gets."""
