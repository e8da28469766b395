"""A connection to a D-Bus peer: calls with deadlines, and signals.

One thread reads; any other thread can call. systemd sends signals about all units to every connection of its
private socket, and keeps unread signals in its own memory. So all messages are read, and only answers and the
requested signals are decoded.

(D-Bus Specification, "Message Protocol" and "Authentication Protocol".) This module is imported only when
there is a unit to query, because jeepney takes 2 MB.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any

from jeepney.auth import BEGIN, AuthenticationError, Authenticator
from jeepney.low_level import HeaderFields, Message, MessageType, calc_msg_size

from proxy.model.errors import CgroupError, UnavailableError

_HEADER_BYTES = 16
"""The first bytes of a message, which contain its length."""
_MESSAGE_LIMIT_BYTES = 4 << 20
"""The most bytes of a message; the messages that are used here have a few hundred."""
_SIGNAL = 4
_NO_SUCH_UNIT = (
    "org.freedesktop.systemd1.NoSuchUnit",
    "org.freedesktop.systemd1.LoadFailed",
    "org.freedesktop.DBus.Error.UnknownObject",
)
_DENIED = (
    "org.freedesktop.DBus.Error.AccessDenied",
    "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired",
)
_UNREACHABLE_ERRORS = (
    "org.freedesktop.DBus.Error.NoReply",
    "org.freedesktop.DBus.Error.ServiceUnknown",
    "org.freedesktop.DBus.Error.NameHasNoOwner",
    "org.freedesktop.DBus.Error.Disconnected",
)


class _Waiter:
    """A call that waits for its answer."""

    __slots__ = ("answer", "done")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.answer: Message | None = None


class DbusConnection:
    """One connection; it cannot be used again after it has ended."""

    def __init__(self, path: str, timeout_s: float) -> None:
        """Connect and authenticate.

        Args:
            path: The path of the unix socket.
            timeout_s: Deadline of connecting, and of each call.

        Raises:
            UnavailableError: There is no peer, it refuses the connection, or no file descriptor is free.
        """
        self.path = path
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._serials = count(1)
        self._waiting: dict[int, _Waiter] = {}
        self._closed = False
        try:
            with ExitStack() as unless_connected:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
                unless_connected.callback(self._socket.close)
                self._socket.settimeout(timeout_s)
                self._socket.connect(path)
                self._authenticate()
                unless_connected.pop_all()
        except (OSError, AuthenticationError) as error:
            raise UnavailableError(f"cannot connect to {path}: {_cause(error)}") from None
        # Reads have no deadline. Sends have one, because a peer can stop accepting data.
        self._socket.settimeout(None)
        whole, rest = divmod(timeout_s, 1)
        limit = struct.pack("ll", int(whole), int(rest * 1e6) or int(not whole))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _authenticate(self) -> None:
        self._socket.sendall(b"\0")
        authenticator = Authenticator(inc_null_byte=False)
        for line in authenticator:
            self._socket.sendall(line)
            got = self._socket.recv(1024)
            if not got:
                raise ConnectionResetError(errno.ECONNRESET, "it has closed the connection")
            authenticator.feed(got)
        self._socket.sendall(BEGIN)

    def call(self, message: Message) -> tuple[Any, ...]:
        """Make a call and return the body of the answer; for any thread except the one that reads.

        Raises:
            UnavailableError: There is no answer in time, or the connection has ended.
            CgroupError: The answer is an error; errno is ENOENT if there is no such unit.
        """
        waiter = _Waiter()
        with self._lock:
            if self._closed:
                raise UnavailableError(f"cannot call {self.path}: the connection is closed")
            serial = next(self._serials)
            self._waiting[serial] = waiter
            try:
                self._socket.sendall(message.serialise(serial))
            except OSError as error:  # a part may have been sent: no message can follow
                del self._waiting[serial]
                self._shut_down()
                raise UnavailableError(f"cannot call {self.path}: {_cause(error)}") from None
        answered = waiter.done.wait(self._timeout_s)
        with self._lock:
            self._waiting.pop(serial, None)
        if waiter.answer is None:
            cause = "the connection has ended" if answered else f"no answer within {self._timeout_s:g} s"
            raise UnavailableError(f"cannot call {self.path}: {cause}")
        return _body(message, waiter.answer)

    def read_signals(self, signal: bytes) -> Iterator[Message]:
        """Read until the connection ends, answer waiting calls, and yield some signals.

        Args:
            signal: A text that yielded signals contain; all others are skipped.
        """
        try:
            with self._socket.makefile("rb", buffering=8192) as stream:
                while (raw := self._next(stream.read)) is not None:
                    if raw[1] == _SIGNAL:
                        if signal in raw:
                            yield Message.from_buffer(raw)
                        continue
                    message = Message.from_buffer(raw)
                    with self._lock:
                        waiter = self._waiting.get(message.header.fields.get(HeaderFields.reply_serial, -1))
                    if waiter is not None:
                        waiter.answer = message
                        waiter.done.set()
        except (OSError, ValueError, KeyError, IndexError, TypeError, struct.error):
            pass  # the connection has ended, or the peer does not speak D-Bus
        finally:
            self.close()

    @staticmethod
    def _next(read: Callable[[int], bytes]) -> bytes | None:
        head = read(_HEADER_BYTES)
        if len(head) < _HEADER_BYTES:
            return None
        size = calc_msg_size(head)
        if size > _MESSAGE_LIMIT_BYTES:
            return None
        rest = read(size - _HEADER_BYTES)
        return head + rest if len(rest) == size - _HEADER_BYTES else None

    def _shut_down(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, from any thread; waiting calls fail."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting, self._waiting = list(self._waiting.values()), {}
        self._shut_down()
        self._socket.close()
        for waiter in waiting:
            waiter.done.set()


def _body(request: Message, answer: Message) -> tuple[Any, ...]:
    """Return the content of an answer.

    Raises:
        UnavailableError, CgroupError: The answer is an error.
    """
    if answer.header.message_type is not MessageType.error:
        return tuple(answer.body)
    name = str(answer.header.fields.get(HeaderFields.error_name, ""))
    text = str(answer.body[0]) if answer.body else "no reason given"
    message = f"cannot {request.header.fields[HeaderFields.member]} at systemd: {text} ({name})"
    if name in _UNREACHABLE_ERRORS:
        raise UnavailableError(message)
    number = errno.ENOENT if name in _NO_SUCH_UNIT else errno.EACCES if name in _DENIED else 0
    raise CgroupError(message, number)


def _cause(error: Exception) -> str:
    if isinstance(error, TimeoutError | BlockingIOError):
        return "no answer in time"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error)
