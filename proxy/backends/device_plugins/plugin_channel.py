"""Calls to one device plugin on its socket: each has a deadline, and none blocks a thread of the daemon.

Calls begin and end on the event loop; gRPC reports their end from its own thread. The stream of device lists
is read by one thread for each plugin, which only forwards bytes and decodes nothing. It pauses after each
message, so that a plugin that sends without end costs little; during the pause, gRPC's flow control makes
the plugin wait.

gRPC is imported with the first call. This does not block the event loop: the process that makes the first
call serves registrations, and has imported gRPC in a thread for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from proxy.backends.device_plugins.messages import MESSAGE_LIMIT_BYTES, PluginAnswerError
from proxy.model.grpc_status import NO_ANSWER, GrpcStatus
from proxy.wire.grpc_channel import SINGLE_THREADED_STREAM, GrpcChannel, details_of

SERVICE: Final = "/v1beta1.DevicePlugin"
READ_GAP_S: Final = 0.005
"""Seconds between two messages that are read from a plugin."""
MARGIN_S: Final = 1.0
"""If gRPC has not reported the end of a call this many seconds after its deadline, the call is given up."""
_TOO_LARGE: Final = re.compile("(?<!SERVER: )Received message larger than max")
"""gRPC's text if this side refuses an answer; it begins with SERVER if the plugin refuses a request."""


class PluginCallError(Exception):
    """A call has failed.

    Attributes:
        answered: True if the plugin has answered with this error; False if it is gone or does not answer.
    """

    def __init__(self, message: str, *, answered: bool) -> None:
        super().__init__(message)
        self.answered = answered


class PluginChannel:
    """A connection to one plugin; for the event loop."""

    def __init__(self, path: Path) -> None:
        """Store the path of the socket; nothing is dialled before the first call."""
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._channel = GrpcChannel(path, MESSAGE_LIMIT_BYTES, SINGLE_THREADED_STREAM)

    async def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """Make a call.

        Args:
            method: The name of the method.
            request: The encoded request.
            timeout_s: Deadline in seconds.

        Raises:
            PluginCallError: There is no answer in time, or it is an error.
            PluginAnswerError: The answer is longer than ``MESSAGE_LIMIT_BYTES``.
        """
        answer: asyncio.Future[bytes] = self._loop.create_future()
        try:
            begin: Any = self._channel.open().unary_unary(f"{SERVICE}/{method}")
            call = begin.future(request, timeout=timeout_s)
        except ValueError:  # grpc's error for a closed channel
            raise PluginCallError("the connection is closed", answered=False) from None
        call.add_done_callback(lambda done: self._run_on_loop(_pass_result, answer, done, timeout_s))
        try:
            async with asyncio.timeout(timeout_s + MARGIN_S):
                return await answer
        except TimeoutError:
            raise PluginCallError(f"no answer within {timeout_s:g} s", answered=False) from None
        finally:
            call.cancel()

    def watch(self, arrived: Callable[[bytes], None], ended: Callable[[str], None]) -> None:
        """Begin to listen to the lists of devices (ListAndWatch), in a thread.

        Args:
            arrived: Called in that thread with each message.
            ended: Called on the loop, once, with the cause.
        """
        name = f"device-plugin {self._path.name}"
        threading.Thread(target=self._watch, args=(arrived, ended), name=name[:60], daemon=True).start()

    def close(self) -> None:
        """End all calls and the stream; calls after that fail."""
        self._channel.close()

    def _watch(self, arrived: Callable[[bytes], None], ended: Callable[[str], None]) -> None:
        import grpc

        reason = "it has ended the list of its devices"
        try:
            listen: Any = self._channel.open().unary_stream(f"{SERVICE}/ListAndWatch")
            for message in listen(b""):
                arrived(message)
                time.sleep(READ_GAP_S)
        except grpc.RpcError as error:
            reason = _message_of(error)
        except ValueError:
            reason = "the connection is closed"
        self._run_on_loop(ended, reason)

    def _run_on_loop(self, job: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(job, *args)


def _pass_result(answer: asyncio.Future[bytes], call: Any, timeout_s: float) -> None:
    """Forward the end of a call to the coroutine that waits for it, if it still waits."""
    if answer.done():
        return
    code = call.code().value[0]
    if code == GrpcStatus.OK:
        answer.set_result(call.result())
    elif code == GrpcStatus.DEADLINE_EXCEEDED:
        answer.set_exception(PluginCallError(f"no answer within {timeout_s:g} s", answered=False))
    elif code == GrpcStatus.RESOURCE_EXHAUSTED and _TOO_LARGE.search(call.details() or ""):
        answer.set_exception(PluginAnswerError(f"its answer has more than {MESSAGE_LIMIT_BYTES} bytes"))
    else:
        answer.set_exception(PluginCallError(_message_of(call), answered=code not in NO_ANSWER))


def _message_of(error: Any) -> str:
    return f"{details_of(error)} ({error.code().name})"
