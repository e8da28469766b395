"""The socket that kubelet calls, opened before most of the daemon is imported.

The socket depends only on the configuration and the machine. Importing the rest of the daemon takes longer
than reading both; during the import the kernel queues connections. Signals for a stop or a reload wait until
the daemon can handle them.
"""

from __future__ import annotations

import os
import signal

from msgspec import Struct

from proxy.config.machine_checks import start_config
from proxy.config.schema import Config
from proxy.model.machine import Machine
from proxy.sockets.unix_socket import Listener, open_listener
from proxy.succession.predecessor import Predecessor
from proxy.topology.reader import read_machine

BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that wait until the daemon handles them."""


class EarlySocket(Struct, frozen=True):
    """An open socket, and the facts on which it depends.

    Attributes:
        config: The configuration to start with.
        notices: Settings that wait for offline hardware, have no effect, or have a new name; see
            ``check_start``.
        machine: The hardware.
        listener: The socket.
        predecessor: The daemon that this process replaces.
    """

    config: Config
    notices: list[str]
    machine: Machine
    listener: Listener
    predecessor: Predecessor | None = None


def open_socket(config: Config, machine: Machine | None = None) -> EarlySocket:
    """Open the socket.

    Args:
        config: The configuration.
        machine: The hardware; read from ``sysfsRoot`` if None.

    Raises:
        TopoproxyError: The machine cannot be read or does not suit the settings, or the socket cannot be
            bound.
    """
    if machine is None:
        machine = read_machine(config.sysfs_root, config.procfs_root)
    config, notices = start_config(config, machine)
    predecessor = Predecessor.of(os.environ)
    if predecessor is None:
        return EarlySocket(config, notices, machine, open_listener(config.listen, config.runtime))
    return EarlySocket(config, notices, machine, predecessor.listener(config.listen), predecessor)


def block_signals() -> None:
    """Block signals until ``deliver_signals``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)


def deliver_signals() -> None:
    """Deliver signals again, including those that have waited."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
