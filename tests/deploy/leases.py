"""One Lease served over HTTP, as by the API server."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Leases:
    """One Lease served over HTTP, as by the API server.

    Attributes:
        cut_off: How many answers come without their end.
        stored: Set once a Lease was stored.
        answers: Cleared while the answers of writes are held back.
    """

    def __init__(self) -> None:
        self.lease: dict[str, Any] = {}
        self.version = 0
        self.conflicts = 0
        self.free_after = 0
        self.cut_off = 0
        self.stored = threading.Event()
        self.answers = threading.Event()
        self.answers.set()
        lock = threading.Lock()
        leases = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                leases.free_after -= 1
                if leases.free_after == 0:
                    leases.hold("", 0)
                self.answer(200 if leases.lease else 404, leases.lease)

            def do_POST(self) -> None:
                self.store(201)

            def do_PUT(self) -> None:
                self.store(200)

            def store(self, status: int) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    version = body["metadata"].get("resourceVersion")
                    if leases.conflicts or version != leases.resource_version:
                        leases.conflicts = max(0, leases.conflicts - 1)
                        return self.answer(409, {})
                    leases.version += 1
                    body["metadata"]["resourceVersion"] = str(leases.version)
                    leases.lease = body
                leases.stored.set()
                leases.answers.wait(20)
                return self.answer(status, body)

            def answer(self, status: int, body: object) -> None:
                data = json.dumps(body).encode()
                if leases.cut_off:
                    leases.cut_off -= 1
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data) + leases.cut_off))
                    self.end_headers()
                    self.wfile.write(data[:-1])
                    self.close_connection = True
                    return
                with suppress(ConnectionError):  # the client may have ended
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def resource_version(self) -> str | None:
        found: str | None = self.lease.get("metadata", {}).get("resourceVersion")
        return found

    @property
    def holder(self) -> str:
        return str(self.lease.get("spec", {}).get("holderIdentity", ""))

    def hold(self, node: str, age_s: float, lasts_s: int = 900) -> None:
        renewed = datetime.now(UTC) - timedelta(seconds=age_s)
        spec = {
            "holderIdentity": node,
            "leaseDurationSeconds": lasts_s,
            "renewTime": f"{renewed:%Y-%m-%dT%H:%M:%S.%fZ}",
        }
        self.version += 1
        self.lease = {"metadata": {"name": "turn", "resourceVersion": str(self.version)}, "spec": spec}
