"""A stand-in for kubelet's server: it serves a list of pods over TLS to clients with a certificate."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


def certificate(directory: Path) -> tuple[Path, Path]:
    """Create a self-signed certificate for 127.0.0.1, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    cert, key = directory / "kubelet.crt", directory / "kubelet.key"
    made = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=node-1", "-addext", "subjectAltName=IP:127.0.0.1"]
    run = [openssl, "req", *made, *names, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(run, check=True, capture_output=True)
    return cert, key


class KubeletServer:
    """Serves the list of pods until it is closed.

    Attributes:
        items: The pods.
        request_count: The number of requests so far.
        settings: The daemon's configuration to read the list.
    """

    def __init__(self, directory: Path) -> None:
        self.items: list[Mapping[str, Any]] = []
        self.request_count = 0
        cert, key = certificate(directory)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.request_count += 1
                content = json.dumps({"kind": "PodList", "apiVersion": "v1", "items": outer.items}).encode()
                self.send_response(200 if self.path == "/pods" else 404)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        context.load_verify_locations(cert)
        context.verify_mode = ssl.CERT_REQUIRED
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.settings = {
            "pods": f"https://127.0.0.1:{self._server.server_address[1]}",
            "caFile": str(cert),
            "certFile": str(cert),
            "keyFile": str(key),
            "timeout": "5s",
        }

    def add(self, name: str, *, init: tuple[tuple[str, str, str], ...] = (), **main: str) -> None:
        """Add a Guaranteed pod with a container ``main``.

        Args:
            name: Its name; its uid is that of ``Cri.pod_config``.
            init: Init containers: name, CPUs, memory.
            main: Limits of ``main``.
        """

        def container(name: str, limits: Mapping[str, str]) -> dict[str, object]:
            return {"name": name, "image": "any", "resources": {"requests": limits, "limits": limits}}

        first = [container(name, {"cpu": cpu, "memory": memory}) for name, cpu, memory in init]
        metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
        spec = {"initContainers": first, "containers": [container("main", main)]}
        self.items.append({"metadata": metadata, "spec": spec, "status": {"qosClass": "Guaranteed"}})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
