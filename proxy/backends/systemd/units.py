"""Read and set the CPUs and memory nodes of systemd units, and receive daemon-reload notifications.

On cgroup v2 systemd writes ``cpuset.cpus`` and ``cpuset.mems`` of a unit from its properties ``AllowedCPUs``
and ``AllowedMemoryNodes`` at certain times: at a daemon-reload, and at a change of any property of the unit.
This overwrites values that were written to the files. So values that must last are set as the unit's
properties (``SetUnitProperties`` with ``runtime``: they survive reloads and last until the unit ends).

* The value is an array of bytes; bit 0 of byte 0 is CPU 0 (systemd.resource-control(5); systemd's
  cpu-set-util). runc before 1.1.6 sends the bytes in the reverse order (opencontainers/runc pull request
  3808).
* systemd answers ``SetUnitProperties`` before it writes the files, and writes them before it reads the next
  message. So ``set`` makes another request afterwards, whose answer shows that the files have been written.
* root reaches systemd by its private socket, which needs no bus; other users need the system bus. On the
  private socket all signals arrive; on the bus only those that were subscribed to.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.executor.systemd.ports import SystemdEvent, UnitSets
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import CgroupError, TopoproxyError, UnavailableError
from proxy.model.idset import CpuSet, IdSet, Mask

if TYPE_CHECKING:
    from proxy.backends.systemd.dbus import DbusConnection

PRIVATE_SOCKET, BUS_SOCKET = Path("run/systemd/private"), Path("run/dbus/system_bus_socket")
_NAME, _PATH = "org.freedesktop.systemd1", "/org/freedesktop/systemd1"
_MANAGER = "org.freedesktop.systemd1.Manager"
_PROPERTIES = "org.freedesktop.DBus.Properties"
_MATCH = f"type='signal',sender='{_NAME}',interface='{_MANAGER}',member='Reloading'"
_PAUSES = Backoff(0.1, 10.0, steady=1.0)
"""Seconds before connecting again. The pauses grow while connections last for less than ``steady``."""
_JOIN_S = 2.0


def systemd_sockets(root: Path = Path("/")) -> list[str]:
    """Return the sockets by which systemd can be reached, the best first."""
    private = [PRIVATE_SOCKET] if os.geteuid() == 0 else []
    return [str(root / path) for path in (*private, BUS_SOCKET) if (root / path).exists()]


def mask_bytes(ids: IdSet) -> bytes:
    """Return a set in systemd's format; no bytes for the empty set."""
    return ids.bits.to_bytes((ids.bits.bit_length() + 7) // 8, "little")


def object_path(unit: str) -> str:
    """Return the D-Bus object of a unit; bytes that are not letters or digits are written as ``_xx``."""
    escaped = "".join(
        chr(c) if chr(c).isalnum() and c < 128 and not (chr(c).isdigit() and i == 0) else f"_{c:02x}"
        for i, c in enumerate(unit.encode())
    )
    return f"{_PATH}/unit/{escaped}"


class SystemdUnits:
    """Implements ``proxy.executor.systemd.ports.Units``."""

    def __init__(
        self, addresses: Callable[[], Sequence[str]] = systemd_sockets, timeout_s: float = 10.0
    ) -> None:
        """Store the address of systemd; nothing is dialled before ``watch``.

        Args:
            addresses: Returns the sockets to try, the best first; the bus is recognised by the file name.
            timeout_s: Deadline of each call. A reload keeps systemd busy for seconds on a full node.
        """
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._closing = threading.Event()
        self._ready = threading.Condition()
        self._connection: DbusConnection | None = None
        self._disconnected_because = "it is not connected yet"
        self._thread: threading.Thread | None = None

    # -- calls --------------------------------------------------------------------------------------------

    def read(self, unit: str) -> UnitSets:
        """Read the configured CPUs and memory nodes of a unit; see ``Units``."""
        return UnitSets(
            CpuSet.from_bits(self._property(unit, "AllowedCPUs")),
            Mask.from_bits(self._property(unit, "AllowedMemoryNodes")),
        )

    def _property(self, unit: str, name: str) -> int:
        kind = "Slice" if unit.endswith(".slice") else "Scope"
        argument = (f"{_NAME}.{kind}", name)
        match self._call(object_path(unit), _PROPERTIES, "Get", "ss", argument):
            case (("ay", value),):
                return int.from_bytes(bytes(value), "little")
            case ((signature, _),):
                cause = f"systemd answers with another type ({signature})"
            case _:
                cause = "systemd does not answer with one value"
        raise CgroupError(f"cannot read {name} of {unit}: {cause}")

    def set(self, unit: str, cpus: CpuSet | None, mems: Mask | None) -> None:
        """Set the configured CPUs and memory nodes of a unit; see ``Units``."""
        pairs = (("AllowedCPUs", cpus), ("AllowedMemoryNodes", mems))
        values = [(name, ("ay", mask_bytes(ids))) for name, ids in pairs if ids is not None]
        self._call(_PATH, _MANAGER, "SetUnitProperties", "sba(sv)", (unit, True, values))
        self._property(unit, "AllowedCPUs")  # waits for the files, see the docstring of this module

    def _call(self, path: str, interface: str, method: str, signature: str, body: tuple[Any, ...]) -> Any:
        from jeepney.wrappers import DBusAddress, new_method_call

        address = DBusAddress(path, _NAME, interface)
        return self._connected().call(new_method_call(address, method, signature, body))

    def _connected(self) -> DbusConnection:
        with self._ready:
            self._ready.wait_for(lambda: self._connection or self._closing.is_set(), self._timeout_s)
            if self._connection is None:
                raise UnavailableError(f"cannot query systemd: {self._disconnected_because}")
            return self._connection

    # -- the connection -----------------------------------------------------------------------------------

    def watch(self, on_event: Callable[[SystemdEvent], None]) -> None:
        """Connect, and listen; see ``Units``."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._stay_connected, args=(on_event,), name="systemd", daemon=True
            )
            self._thread.start()

    def _stay_connected(self, on_event: Callable[[SystemdEvent], None]) -> None:
        """Stay connected until ``close``; runs in the thread."""
        pauses = RetryDelays(_PAUSES)
        while not self._closing.is_set():
            lasted = 0.0
            try:
                with closing(self._dial()) as connection:
                    started = time.monotonic()
                    self._listen(connection, on_event)
                    lasted = time.monotonic() - started
            except TopoproxyError as error:
                self._disconnected_because = str(error)
            except Exception as error:  # noqa: BLE001  whatever the error, the thread must connect again
                self._disconnected_because = f"{type(error).__name__}: {error}"
            self._closing.wait(pauses.next(lasted))

    def _dial(self) -> DbusConnection:
        from proxy.backends.systemd.dbus import DbusConnection

        failure = UnavailableError("cannot connect to systemd: it has no socket here")
        for path in self._addresses():
            try:
                return DbusConnection(path, self._timeout_s)
            except UnavailableError as error:
                failure = error
        raise failure

    def _listen(self, connection: DbusConnection, on_event: Callable[[SystemdEvent], None]) -> None:
        bus = connection.path.endswith(BUS_SOCKET.name)
        subscriber = threading.Thread(target=self._subscribe, args=(connection, on_event, bus), daemon=True)
        subscriber.start()  # its calls are answered in this thread
        try:
            for message in connection.read_signals(b"Reloading"):
                if message.body == (False,):
                    on_event(SystemdEvent.RELOADED)
        finally:
            connection.close()  # ends the subscriber's calls; it may still report the connection
            subscriber.join()
            with self._ready:
                was, self._connection = self._connection, None
                if was is not None:  # if None, the subscriber has stored why it failed
                    self._disconnected_because = "the connection has ended"
            if was is not None and not self._closing.is_set():
                on_event(SystemdEvent.LOST)

    def _subscribe(
        self, connection: DbusConnection, on_event: Callable[[SystemdEvent], None], bus: bool
    ) -> None:
        """Subscribe to signals, and allow calls."""
        from jeepney.wrappers import DBusAddress, new_method_call

        try:
            if bus:
                daemon = DBusAddress("/org/freedesktop/DBus", "org.freedesktop.DBus", "org.freedesktop.DBus")
                connection.call(new_method_call(daemon, "Hello"))
                connection.call(new_method_call(daemon, "AddMatch", "s", (_MATCH,)))
                manager = DBusAddress(_PATH, _NAME, _MANAGER)
                connection.call(new_method_call(manager, "Subscribe"))
        except TopoproxyError as error:
            self._disconnected_because = str(error)
            connection.close()
            return
        with self._ready:
            if self._closing.is_set():
                connection.close()
                return
            self._connection = connection
            self._ready.notify_all()
        on_event(SystemdEvent.CONNECTED)

    def close(self) -> None:
        """Disconnect permanently."""
        self._closing.set()
        with self._ready:
            connection = self._connection
            self._ready.notify_all()
        if connection is not None:
            connection.close()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
