"""Limits of a simulated machine."""

MAX_PODS = 110
"""kubelet's ``maxPods`` where it is not set."""
