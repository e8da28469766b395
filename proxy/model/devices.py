"""What a device plug-in answers to Allocate: what a container needs to use the devices that it was given."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field


class DeviceNode(Struct, frozen=True):
    """A device file that a container gets.

    Attributes:
        host_path: Where it is on the host.
        container_path: Where it is in the container.
        permissions: Some of ``r``, ``w`` and ``m`` (read, write, make nodes).
    """

    host_path: str
    container_path: str
    permissions: str = ""


class DeviceMount(Struct, frozen=True):
    """A file or directory that a container gets.

    Attributes:
        host_path: Where it is on the host.
        container_path: Where it is in the container.
        read_only: Whether the container cannot write it.
    """

    host_path: str
    container_path: str
    read_only: bool = False


class AllocateAnswer(Struct, frozen=True):
    """What one plug-in adds to the request of a container.

    Attributes:
        envs: Environment variables by name.
        annotations: Annotations of the container by key.
        mounts: Files and directories.
        devices: Device files.
        cdi: CDI device names, of the form ``vendor.com/class=name``.
    """

    envs: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[DeviceMount, ...] = ()
    devices: tuple[DeviceNode, ...] = ()
    cdi: tuple[str, ...] = ()
