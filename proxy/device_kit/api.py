"""The names that the author of a device plugin imports; docs/device-kit.md shows their use."""

from __future__ import annotations

from proxy.device_kit.service import DevicePlugin, FunctionPlugin, PluginDevice
from proxy.device_kit.serving import serve
from proxy.model.devices import AllocateAnswer, DeviceMount, DeviceNode

__all__ = [
    "AllocateAnswer",
    "DeviceMount",
    "DeviceNode",
    "DevicePlugin",
    "FunctionPlugin",
    "PluginDevice",
    "serve",
]
