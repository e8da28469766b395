"""Bind policies of Koordinator: which CPUs a pod is bound to, and on which NUMA nodes. Pure."""
