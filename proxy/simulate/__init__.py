"""Simulation without a node: machines from files, pods from manifests, and the engine of ``serve``."""
