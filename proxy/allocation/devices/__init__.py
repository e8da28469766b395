"""Devices of device plugins: registration, hints and allocation, as kubelet's device manager."""
