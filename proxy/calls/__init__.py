"""Decisions on kubelet's calls, independent of the protocol: the common layer below all front ends."""
