"""The registration server of device plugins, v1beta1: checks registrations, and passes them on.

As in kubelet (kubernetes v1.36 pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go), ``Register`` is
answered after the plugin was reached and has returned its options: a plugin serves before it registers.
gRPC's threads take requests and wait; the event loop does the rest.

A plugin registers with the name of its socket. kubelet joins it to the directory and accepts any resulting
path (kubernetes v1.36 pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go, Register). Here the path must
stay in the directory.

At its start kubelet removes all sockets in its directory (manager.go, CleanupPluginDirectory) and creates its
own again. This is the signal for plugins to register: they watch the directory for their own socket, or for
a new ``kubelet.sock``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import posixpath
import stat
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from google.protobuf.message import DecodeError
from msgspec import Struct

from proxy.api.kubelet import deviceplugin_pb2 as pb
from proxy.config.endpoint import PATH_LIMIT
from proxy.executor.device_ports import DevicePluginError
from proxy.model.devices import is_extended_resource
from proxy.model.errors import CannotCreateError, InputError, PermissionDeniedError, TopoproxyError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.quoting import quoted
from proxy.sockets.grpc_socket import GrpcSocket, cancel_with_call, refuse_call
from proxy.sockets.unix_socket import require_no_live_socket
from proxy.telemetry import metrics

if TYPE_CHECKING:
    import grpc

    from proxy.telemetry.port import Telemetry

SERVICE: Final = "v1beta1.Registration"
VERSION: Final = "v1beta1"
"""The one version that kubelet accepts (k8s.io/kubelet v0.36 pkg/apis/deviceplugin/v1beta1/constants.go)."""
AT_ONCE = 32
"""Requests that are answered at a time, each in a thread that only waits; others are refused."""
REQUEST_LIMIT: Final = 16 << 10
"""Bytes of a request."""
REGISTRATION_TIMEOUT_S: Final = 30.0
"""The longest time of a registration, in seconds."""
STOP_S: Final = 0.5
REFUSED: Final = "cannot register a device plugin"

Register = Callable[[str, Path], Awaitable[None]]
"""Takes a resource and the socket of its plugin; may raise ``DevicePluginError``."""

SOCKET_NAME: Final = "kubelet.sock"
"""The name of the registration server's socket, which plugins have built in."""
DIRECTORY_MODE: Final = 0o750
"""Mode of the directory, as kubelet's."""


def prepare_directory(directory: Path) -> None:
    """Create the directory, and remove the sockets in it, except that of the server.

    Raises:
        CannotCreateError: It cannot be created, or a socket cannot be removed.
        PermissionDeniedError: The process may not do that.
    """
    try:
        directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        for entry in directory.iterdir():
            if entry.name != SOCKET_NAME and _is_socket(entry):
                entry.unlink(missing_ok=True)
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot prepare the directory {directory}: {error.strerror}") from error
    except OSError as error:
        raise CannotCreateError(f"cannot prepare the directory {directory}: {error.strerror}") from error


def _is_socket(path: Path) -> bool:
    """Return whether the path is a socket, or a symbolic link to one."""
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(path.stat().st_mode)
    return False


def socket_of(directory: Path, endpoint: str) -> Path:
    """Return the socket of a plugin.

    Args:
        directory: The directory.
        endpoint: The name that the plugin has registered with.

    Raises:
        InputError: It leads out of the directory, or to the server itself, or is too long.
    """
    # As in Go's filepath.Join, an absolute endpoint is below the directory too.
    relative = posixpath.normpath(f"./{endpoint}")
    cause = ""
    if not endpoint or "\0" in endpoint or relative in (".", SOCKET_NAME):
        cause = "it is not the name of a plugin's socket"
    elif relative == ".." or relative.startswith("../"):
        cause = "it leads out of the directory"
    path = directory / relative
    if not cause and len(os.fsencode(path)) > PATH_LIMIT:
        cause = f"the path is longer than {PATH_LIMIT} bytes"
    if not cause and path.parent.resolve() != directory.resolve() / posixpath.dirname(relative):
        cause = "it leads out of the directory"
    if not cause and path.is_symlink():
        cause = "it is a symbolic link"
    if cause:
        raise InputError(f"cannot use the endpoint {quoted(endpoint)}: {cause}")
    return path


class ForwardTarget(Protocol):
    """kubelet, as the manager of the resources that are not taken over. Every method may block."""

    def forward(self, request: pb.RegisterRequest, path: Path) -> None:
        """Register a plugin there.

        Raises:
            KubeletError: It is refused, or there is no answer.
        """

    def remove_links(self) -> None:
        """Remove the links that earlier runs have left there."""

    def socket_identity(self) -> object:
        """Return a value that changes with each start of kubelet; None while it does not run."""

    def close(self) -> None:
        """End calls in progress."""


class Forwarding(Struct, frozen=True):
    """The resources that are registered here, if others are forwarded.

    Attributes:
        registered_here: Resources that are registered here.
        target: Takes all others.
    """

    registered_here: Collection[str]
    target: ForwardTarget


class RegistrationServer:
    """Serves registrations in one directory; make it on the event loop."""

    def __init__(
        self, directory: Path, register: Register, telemetry: Telemetry, forwarding: Forwarding | None = None
    ) -> None:
        """Prepare; nothing is opened before ``open``.

        Args:
            directory: The directory of the sockets.
            register: Called on the loop for each valid registration.
            telemetry: Counts registrations and reports those that are refused.
            forwarding: Which registrations are forwarded; None: none.
        """
        self._directory = directory
        self._register = register
        self._telemetry = telemetry
        self._forwarding = forwarding
        self._forwarded: set[Path] = set()
        self._is_open = False
        self._loop = asyncio.get_running_loop()
        self._socket = GrpcSocket(
            directory / SOCKET_NAME,
            "serve registrations of device plugins",
            SERVICE,
            self._handlers,
            threads=AT_ONCE,
            max_requests=AT_ONCE,
            options=(("grpc.max_receive_message_length", REQUEST_LIMIT),),
            grace_s=STOP_S,
            close_timeout_s=2 * STOP_S,
            needs_create_event=True,
        )

    def open(self) -> None:
        """Remove the sockets of plugins, so that they register again, and listen; called once, in a thread.

        Raises:
            TopoproxyError: The directory or the socket cannot be created, or another process serves there.
        """
        if self._is_open:
            return
        require_no_live_socket(self._directory / SOCKET_NAME)
        prepare_directory(self._directory)
        if self._forwarding is not None:
            self._forwarding.target.remove_links()
        self._socket.open()
        self._is_open = True

    def reopen(self) -> None:
        """Signal that the other manager has started, so that plugins that registered there register again.

        The manager has removed its links to their sockets. So the sockets are removed, and the server's
        socket is created again. Runs in a thread.

        Raises:
            TopoproxyError: The socket cannot be created again.
        """
        self._socket.close()
        gone, self._forwarded = self._forwarded, set()
        for path in list(gone):
            with contextlib.suppress(OSError):  # that plugin keeps its socket; the others are served again
                path.unlink(missing_ok=True)
        self._socket.open()

    def close(self) -> None:
        """Stop listening permanently; runs in a thread."""
        self._socket.may_open = False
        self._socket.close()

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        import grpc

        return {"Register": grpc.unary_unary_rpc_method_handler(self._answer)}

    # -- one registration ---------------------------------------------------------------------------------

    def _answer(self, content: bytes, context: grpc.ServicerContext) -> bytes:
        """Answer a request, in a thread: with an empty message, or with a status."""
        requested = _decoded(content)
        resource = quoted(requested.resource_name) if requested is not None else ""
        try:
            if requested is None:
                raise InputError("cannot read the registration: RegisterRequest expected")
            if (
                self._forwarding is not None
                and requested.resource_name not in self._forwarding.registered_here
            ):
                self._forward(self._forwarding.target, requested)
            else:
                self._register_on_loop(requested.resource_name, self._checked(requested), context)
        except (TopoproxyError, DevicePluginError) as error:
            self._telemetry.count(metrics.DEVICE_PLUGIN_REGISTRATIONS, result="refused")
            self._telemetry.problem(REFUSED, path=self._directory, resource=resource, err=error)
            refuse_call(context, _code_of(error), str(error))
        self._telemetry.resolved(REFUSED, path=self._directory, resource=resource)
        return b""

    def _checked(self, request: pb.RegisterRequest) -> Path:
        """Return the socket of the plugin, or raise InputError."""
        if request.version != VERSION:
            version = f"{quoted(request.version)} (supported: {VERSION})"
            raise InputError(f"cannot register a device plugin with API version {version}")
        if not is_extended_resource(request.resource_name):
            name = quoted(request.resource_name)
            raise InputError(f"cannot register {name}: it is not the name of an extended resource")
        return socket_of(self._directory, request.endpoint)

    def _forward(self, target: ForwardTarget, request: pb.RegisterRequest) -> None:
        path = socket_of(self._directory, request.endpoint)
        if path.parent != self._directory:
            endpoint = quoted(request.endpoint)
            raise InputError(
                f"cannot forward the registration of {endpoint}: the endpoint is not in this directory"
            )
        target.forward(request, path)
        self._forwarded.add(path)
        self._telemetry.count(metrics.DEVICE_PLUGIN_REGISTRATIONS, result="forwarded")

    def _register_on_loop(self, resource: str, path: Path, context: grpc.ServicerContext) -> None:
        """Register the plugin on the event loop."""

        async def registering() -> None:
            async with asyncio.timeout(REGISTRATION_TIMEOUT_S):
                await self._register(resource, path)

        work = registering()
        try:
            job = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise DevicePluginError(resource, f"cannot register {resource}: the daemon stops") from None
        cancel_with_call(context, job)
        try:
            job.result(REGISTRATION_TIMEOUT_S + STOP_S)
        except (TimeoutError, concurrent.futures.CancelledError):
            job.cancel()
            cause = f"not done within {REGISTRATION_TIMEOUT_S:g} s, or the plugin has left"
            raise DevicePluginError(resource, f"cannot register {resource}: {cause}") from None


def _decoded(content: bytes) -> pb.RegisterRequest | None:
    try:
        return pb.RegisterRequest.FromString(content)
    except DecodeError:
        return None


def _code_of(error: Exception) -> int:
    """Return the status code: that of the other manager if it has answered."""
    if isinstance(error, InputError):
        return GrpcStatus.INVALID_ARGUMENT
    return getattr(error, "code", 0) or GrpcStatus.UNAVAILABLE
