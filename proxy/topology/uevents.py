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
FROM_THE_KERNEL = 1
"""The group of the kernel's own events; udev sends the events that it has processed to another group."""
ACTIONS = (b"online", b"offline", b"add", b"remove")
DIRECTORIES = (b"/devices/system/cpu/cpu", b"/devices/system/memory/memory", b"/devices/system/node/node")
LONGEST = 8192
AT_ONCE = 256


def concerns(message: bytes) -> bool:
    """Return whether a uevent is about a CPU, a block of memory or a NUMA node that came or went."""
    action, _, path = message.partition(b"\0")[0].partition(b"@")
    return action in ACTIONS and path.startswith(DIRECTORIES)


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
            self._socket.bind((0, FROM_THE_KERNEL))
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """The descriptor that is readable when an event has arrived."""
        return self._socket.fileno()

    def changed(self) -> bool:
        """Read the waiting events; return whether one is about CPUs or memory, or events were lost.

        Raises:
            OSError: No further events can be received.
        """
        is_changed = False
        for _ in range(AT_ONCE):
            try:
                message = self._socket.recv(LONGEST)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                is_changed = True  # the kernel's queue overflowed: anything may have happened
            else:
                is_changed = concerns(message) or is_changed
        return is_changed

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def listen() -> tuple[Uevents | None, str]:
    """Subscribe if that is possible; otherwise return None and the reason."""
    try:
        return Uevents(), ""
    except OSError as error:
        return None, f"cannot listen to the kernel's uevents: {error.strerror}"
