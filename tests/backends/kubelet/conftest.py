"""Imitated kubelets: a server of pod lists over HTTP or TLS, and gRPC services on unix sockets."""

from __future__ import annotations

import contextlib
import json
import shutil
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest

Reply = Callable[[BaseHTTPRequestHandler], None]
Method = Callable[[bytes, Any], bytes]


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    directory = tmp_path_factory.mktemp("certificate")
    cert, key = directory / "cert.pem", directory / "key.pem"
    made = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=node-1", "-addext", "subjectAltName=IP:127.0.0.1"]
    run = [openssl, "req", *made, *names, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(run, check=True, capture_output=True)
    return cert, key


class PodsServer:
    """Kubelet's own server. Without ``reply`` it answers with the list of ``items``."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.items: list[dict[str, Any]] = []
        self.reply: Reply | None = None
        self.seen: list[tuple[str, Mapping[str, str]]] = []
        self.over = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.seen.append((self.path, dict(self.headers.items())))
                if outer.reply is not None:
                    with contextlib.suppress(OSError):  # the client went away
                        outer.reply(self)
                    return
                content = json.dumps({"kind": "PodList", "apiVersion": "v1", "items": outer.items})
                send(self, 200, content.encode())

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            server_bind = socketserver.TCPServer.server_bind  # http.server's version looks up the host name

            def handle_error(self, *_: object) -> None:
                """Ignore errors of clients that close the connection: some tests do so."""

            def finish_request(self, request: Any, client_address: Any) -> None:
                # In the connection's thread, so that a client that stalls in its handshake stops no other.
                wrapped = context.wrap_socket(request, server_side=True) if context else request
                try:
                    super().finish_request(wrapped, client_address)
                finally:
                    wrapped.close()

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def send(to: BaseHTTPRequestHandler, status: int, content: bytes) -> None:
    to.send_response(status)
    to.send_header("Content-Length", str(len(content)))
    to.end_headers()
    to.wfile.write(content)


@pytest.fixture
def answer() -> Callable[[int, bytes], Reply]:
    """Return a reply with a status and a body."""
    return lambda status, content: lambda to: send(to, status, content)


@pytest.fixture
def pods_server() -> Iterator[PodsServer]:
    server = PodsServer()
    yield server
    server.close()


@pytest.fixture
def tls_server(certificate: tuple[Path, Path]) -> Iterator[PodsServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    context.load_verify_locations(certificate[0])
    context.verify_mode = ssl.CERT_OPTIONAL
    server = PodsServer(context)
    yield server
    server.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., grpc.Server]]:
    """Serve methods of a gRPC service, from bytes to bytes, on a unix socket."""
    servers: list[grpc.Server] = []

    def started(path: Path, service: str, **methods: Method) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(4))
        handlers: dict[str, Any] = {n: grpc.unary_unary_rpc_method_handler(do) for n, do in methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        assert server.add_insecure_port(f"unix:{path}")
        server.start()
        servers.append(server)
        return server

    yield started
    for server in servers:
        server.stop(None).wait()
