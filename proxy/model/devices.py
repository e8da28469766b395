"""Names of extended resources, and the answers of device plugins to Allocate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field


class DeviceNode(Struct, frozen=True):
    """A device file that a container gets.

    Attributes:
        host_path: Its path on the host.
        container_path: Its path in the container.
        permissions: Some of ``r``, ``w`` and ``m`` (read, write, make nodes).
    """

    host_path: str
    container_path: str
    permissions: str = ""


class DeviceMount(Struct, frozen=True):
    """A file or directory that a container gets.

    Attributes:
        host_path: Its path on the host.
        container_path: Its path in the container.
        read_only: Whether the container cannot write it.
    """

    host_path: str
    container_path: str
    read_only: bool = False


class AllocateAnswer(Struct, frozen=True):
    """The additions of one plugin to the request of a container.

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


class DeviceField(Struct, frozen=True):
    """A field of a create's message that a device plugin has set.

    Attributes:
        plugin: The plugin, as messages name it.
        value: A variable's or an annotation's text; of a mount the path on the host and whether it is
            read-only; of a device file the path on the host and the permissions.
    """

    plugin: str
    value: tuple[object, ...]


_NATIVE: Final = "kubernetes.io/"
_IN_QUOTAS: Final = "requests."
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_DOMAIN_LIMIT: Final = 253


def is_extended_resource(name: str) -> bool:
    """Return whether a name is that of an extended resource, such as ``nvidia.com/gpu``.

    The rule is kubelet's (kubernetes v1.36 pkg/apis/core/v1/helper/helpers.go, IsExtendedResourceName): a DNS
    subdomain, a slash and a name; not of Kubernetes' own domain; and with ``requests.`` before it, as quotas
    have it, it must still be a qualified name.
    """
    if "/" not in name or _NATIVE in name or name.startswith(_IN_QUOTAS):
        return False
    domain, _, resource = name.partition("/")
    domain = f"{_IN_QUOTAS}{domain}"
    labels = domain.split(".")
    return (
        len(domain) <= _DOMAIN_LIMIT
        and all(_LABEL.fullmatch(label) for label in labels)
        and _NAME.fullmatch(resource) is not None
    )
