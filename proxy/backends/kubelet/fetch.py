"""Sends one GET to kubelet's own server, bounded in time and in size.

The timeout of a socket bounds one wait, not the whole exchange: a peer that sends a byte now and then could
block its caller forever. So before every wait the socket's timeout is set to the time that is left until the
deadline; only the look-up of a host name is not bounded. Tokens and certificates are renewed while the daemon
runs, so their files are read for each exchange. No redirect is followed and no proxy of the environment is
used, because the token is meant only for kubelet. It is sent only over TLS.

``http.client`` and ``ssl`` are imported with the first exchange, so that a daemon that does not need them
loads neither.
"""

from __future__ import annotations

import io
import socket
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from proxy import memory_trim
from proxy.backends.kubelet.settings import KubeletError, KubeletSettings
from proxy.backends.kubelet.small_file import read_small_file
from proxy.model.grpc_status import GrpcStatus

if TYPE_CHECKING:
    import http.client
    import ssl

ANSWER_LIMIT_BYTES = 64 << 20
"""The most bytes of an answer; a list of hundreds of pods has a few million."""

_CHUNK_BYTES = 1 << 16
_REASON_LIMIT_BYTES = 200
_TOKEN_LIMIT_BYTES = 1 << 16
_CREDENTIALS_HINT = "; name the file of a valid token or certificate"


class _Endpoint(Struct, frozen=True):
    """An endpoint of kubelet's server.

    Attributes:
        name: Its name in messages.
        path: Its path, used if the configured address has none.
        resource: The resource on which the API server must permit ``get``.
    """

    name: str
    path: str
    resource: str


_PODS = _Endpoint("the pods", "/pods", "nodes/pods")
_CONFIGZ = _Endpoint("the configuration", "/configz", "nodes/configz")


def fetch_pods(settings: KubeletSettings) -> bytes:
    """Read kubelet's list of pods.

    Returns:
        The body of the answer, at most ``ANSWER_LIMIT_BYTES`` bytes.

    Raises:
        KubeletError: The list cannot be read in time.
    """
    return _fetch(settings, settings.pods_url, _PODS)


def fetch_configz(settings: KubeletSettings) -> bytes:
    """Read the configuration of the running kubelet (``/configz``).

    Returns:
        The body of the answer, at most ``ANSWER_LIMIT_BYTES`` bytes.

    Raises:
        KubeletError: The configuration cannot be read in time; ``code`` is DEADLINE_EXCEEDED if kubelet
            hangs.
    """
    return _fetch(settings, settings.configz, _CONFIGZ)


def _fetch(settings: KubeletSettings, address: str, endpoint: _Endpoint) -> bytes:
    import http.client

    try:
        url = urlsplit(address)
        where = _shown(url)
    except ValueError as error:
        raise KubeletError(f"cannot read {endpoint.name} of kubelet at {address!r}: {error}") from None
    code = GrpcStatus.OK
    try:
        return _exchange(settings, url, endpoint)
    except TimeoutError:
        cause, code = f"no complete answer within {settings.timeout:g} s", GrpcStatus.DEADLINE_EXCEEDED
    except (OSError, ValueError, http.client.HTTPException) as error:
        cause = str(error) or type(error).__name__
    raise KubeletError(f"cannot read {endpoint.name} of kubelet at {where}: {cause}", code)


def _shown(url: SplitResult) -> str:
    """Return an address without the password that it may contain."""
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname or ""
    port = "" if url.port is None else f":{url.port}"
    return f"{url.scheme}://{host}{port}{url.path}"


class _DeadlineSocket:
    """A connected socket for http.client; every wait ends at the same deadline."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket = connected
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        self._socket.settimeout(_remaining_s(self._deadline))
        self._socket.sendall(data)

    def makefile(self, *_: object) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReader(self._socket, self._deadline), _CHUNK_BYTES)

    def close(self) -> None:
        """Do nothing: http.client closes before it reads; the exchange closes the socket at its end."""


class _DeadlineReader(io.RawIOBase):
    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket = connected
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(_remaining_s(self._deadline))
        return self._socket.recv_into(buffer)


def _remaining_s(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining


def _exchange(settings: KubeletSettings, url: SplitResult, endpoint: _Endpoint) -> bytes:
    import http.client

    deadline = time.monotonic() + settings.timeout
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("this is not an http or https address")
    headers = {"Accept": "application/json", "Connection": "close", **_authorization(settings, url.scheme)}
    secure = _tls_context(settings) if url.scheme == "https" else None
    port = url.port or (443 if secure else 80)
    connected = _connect(url.hostname, port, deadline)
    try:
        if secure:
            connected.settimeout(_remaining_s(deadline))
            connected = secure.wrap_socket(connected, server_hostname=url.hostname)
        connection = http.client.HTTPConnection(url.hostname, port)
        bounded: Any = _DeadlineSocket(connected, deadline)
        connection.sock = bounded
        path = endpoint.path if url.path in ("", "/") else url.path
        connection.request("GET", f"{path}?{url.query}" if url.query else path, headers=headers)
        with connection.getresponse() as response:
            return _body(response, endpoint)
    finally:
        connected.close()


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """Connect to the first address that answers."""
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(_remaining_s(deadline))
            connection.connect(address)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure


def _tls_context(settings: KubeletSettings) -> ssl.SSLContext:
    memory_trim.allow_tls_imports()  # the daemon forbids importing ssl until it is needed, to save memory
    import ssl

    try:
        context = ssl.create_default_context(cafile=settings.ca_file or None)
    except OSError as error:
        raise ValueError(f"cannot use the certificates of {settings.ca_file}: {error}") from None
    # Kubelet's certificates follow Go's rules. Newer versions of Python check more, and older versions
    # require a root certificate.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if settings.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if settings.cert_file:
        try:  # the password keeps OpenSSL from asking for one on the terminal
            context.load_cert_chain(settings.cert_file, settings.key_file or None, password="")
        except OSError as error:
            raise ValueError(f"cannot use the certificate {settings.cert_file}: {error}") from None
    return context


def _authorization(settings: KubeletSettings, scheme: str) -> dict[str, str]:
    if not settings.token_file:
        return {}
    if scheme != "https":
        raise ValueError("a token is sent over https only")
    try:
        token = read_small_file(settings.token_file, _TOKEN_LIMIT_BYTES)[0].decode("ascii").strip()
    except OSError as error:
        raise ValueError(f"cannot read the token in {settings.token_file}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"cannot read the token in {settings.token_file}: {error}") from None
    if not token or not token.isprintable() or " " in token:
        raise ValueError(f"cannot use the token in {settings.token_file}: it is not one word")
    return {"Authorization": f"Bearer {token}"}


def _body(response: http.client.HTTPResponse, endpoint: _Endpoint) -> bytes:
    if response.status != 200:
        text = " ".join(response.read(_REASON_LIMIT_BYTES).decode("ascii", "replace").split())
        text = "".join(c if c.isprintable() else "?" for c in text)
        hint = {401: _CREDENTIALS_HINT, 403: f"; allow get on {endpoint.resource} or nodes/proxy"}.get(
            response.status, ""
        )
        raise ValueError(f"it answers {response.status} {response.reason}: {text or 'no reason given'}{hint}")
    promised = response.length
    chunks, size = [], 0
    if promised is None or promised <= ANSWER_LIMIT_BYTES:
        while chunk := response.read(_CHUNK_BYTES):
            size += len(chunk)
            if size > ANSWER_LIMIT_BYTES:
                break
            chunks.append(chunk)
        else:
            if promised is not None and size < promised:
                raise ValueError(f"its answer ended after {size} of {promised} bytes")
            return b"".join(chunks)
    raise ValueError(f"its answer is larger than {ANSWER_LIMIT_BYTES >> 20} MiB")
