"""Simulation without a node: machines from files, pods from manifests, and the engine of ``serve``."""

MAX_PODS = 110
"""kubelet's ``maxPods`` where it is not set. Here, because ``topoproxy simulate --help`` reads it."""
