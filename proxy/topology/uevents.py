r"""Hardware hot-plug events from the kernel: uevents over netlink.

sysfs cannot be watched (inotify does not report its changes), but the kernel sends an event for each CPU,
memory block and NUMA node that comes or goes to group 1 of NETLINK_KOBJECT_UEVENT, which needs no privilege:

    offline@/devices/system/cpu/cpu3\0ACTION=offline\0DEVPATH=...

The group carries events of all devices, including those of each container's network, so only the first line
is parsed. It says only *that* something changed; the new state is read from sysfs.
"""

from __future__ import annotations

import errno
import socket

KOBJECT_UEVENT = 15
"""NETLINK_KOBJECT_UEVENT of linux/netlink.h."""
KERNEL_GROUP = 1
"""The group of the kernel's own events; udev sends the events that it has processed to another group."""
ACTIONS = (b"online", b"offline", b"add", b"remove")
DEVICE_PATHS = (b"/devices/system/cpu/cpu", b"/devices/system/memory/memory", b"/devices/system/node/node")
MESSAGE_LIMIT_BYTES = 8192
MESSAGES_LIMIT = 256


def is_about_cpu_or_memory(message: bytes) -> bool:
    """Return whether a uevent is about a CPU, a block of memory or a NUMA node that came or went."""
    action, _, path = message.partition(b"\0")[0].partition(b"@")
    return action in ACTIONS and path.startswith(DEVICE_PATHS)


class Uevents:
    """A subscription to uevents; implements ``proxy.executor.ports.MachineEvents``."""

    def __init__(self) -> None:
        """Subscribe.

        Raises:
            OSError: The kernel, or the sandbox in which the daemon runs, denies the subscription.
        """
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, kind, KOBJECT_UEVENT)
        try:
            self._socket.bind((0, KERNEL_GROUP))
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """The descriptor that is readable when an event has arrived."""
        return self._socket.fileno()

    def read_changes(self) -> bool:
        """Read the waiting events; return whether one is about CPUs or memory, or events were lost.

        Raises:
            OSError: No further events can be received.
        """
        is_changed = False
        for _ in range(MESSAGES_LIMIT):
            try:
                message = self._socket.recv(MESSAGE_LIMIT_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                is_changed = True  # the kernel's queue overflowed: anything may have happened
            else:
                is_changed = is_about_cpu_or_memory(message) or is_changed
        return is_changed

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def subscribe_to_uevents() -> tuple[Uevents | None, str]:
    """Subscribe if that is possible; otherwise return None and the reason."""
    try:
        return Uevents(), ""
    except OSError as error:
        return None, f"cannot listen to the kernel's uevents: {error.strerror}"
