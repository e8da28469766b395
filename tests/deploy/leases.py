"""One Lease served over HTTP, as by the API server."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Leases:
    """One Lease served over HTTP, as by the API server."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] = {}
        self.version = 0
        self.conflicts = 0
        self.free_after = 0
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
                if leases.conflicts:
                    leases.conflicts -= 1
                    return self.answer(409, {})
                leases.version += 1
                leases.lease = body
                body["metadata"]["resourceVersion"] = str(leases.version)
                return self.answer(status, body)

            def answer(self, status: int, body: object) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def holder(self) -> str:
        return str(self.lease.get("spec", {}).get("holderIdentity", ""))

    def hold(self, node: str, age_s: float) -> None:
        renewed = datetime.now(UTC) - timedelta(seconds=age_s)
        spec = {
            "holderIdentity": node,
            "leaseDurationSeconds": 900,
            "renewTime": f"{renewed:%Y-%m-%dT%H:%M:%S.%fZ}",
        }
        self.lease = {"metadata": {"name": "turn", "resourceVersion": "1"}, "spec": spec}
