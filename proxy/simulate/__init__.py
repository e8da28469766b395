"""Simulation without a node: machines from files, pods from manifests, and the engine of ``serve``."""

MAX_PODS = 110
"""kubelet's default of ``maxPods``. It is here because ``topoproxy simulate --help`` reads it."""
