"""Devices of device plug-ins: registration, hints and allocation, as kubelet's device manager."""
