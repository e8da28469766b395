"""Readers of kubelet's facts: state files, configuration, pods, devices, and the Node object."""
