"""A client of a cluster's administrator; a virtual machine has it too, so that it needs PyYAML alone."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from pathlib import Path
from typing import Any

import yaml

NAMESPACE = "topoproxy-system"
Json = dict[str, Any]
TOO_MANY_REQUESTS = 429
STARTING = "storage is (re)initializing"
"""The answer until the caches of a new API server are filled; client-go repeats such requests."""


class ApiError(Exception):
    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body[:500]}")
        self.status = status


class AdminApiClient:
    """Requests to an API server, whose certificate is not checked."""

    def __init__(self, host: str, port: int, patience_s: float = 10) -> None:
        self.host = host
        self.port = port
        self._patience_s = patience_s
        self._idle: list[http.client.HTTPSConnection] = []
        self._context = ssl.create_default_context()
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    def request(
        self, method: str, path: str, value: Any = None, kind: str = "application/json", *, raw: bool = False,
        token: str = "admin-token",
    ) -> Any:  # fmt: skip
        body = None if value is None else json.dumps(value).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
        end = time.monotonic() + self._patience_s
        status, text = self._answer(method, path, body, headers)
        while status == TOO_MANY_REQUESTS and STARTING in text and time.monotonic() < end:
            time.sleep(0.5)
            status, text = self._answer(method, path, body, headers)
        if status >= 400:
            raise ApiError(status, text)
        return text if raw else json.loads(text)

    def connect(self) -> http.client.HTTPSConnection:
        """Return a new connection to the API server, which is opened by the first request."""
        where, patience = (self.host, self.port), self._patience_s
        return http.client.HTTPSConnection(*where, timeout=patience, context=self._context)

    def _answer(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, str]:
        """Send a request on a connection that is open, if any: a handshake costs more than most answers."""
        while True:
            try:
                connection, is_new = self._idle.pop(), False
            except IndexError:
                connection, is_new = self.connect(), True
            try:
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                text = answer.read().decode()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if is_new or isinstance(error, TimeoutError):
                    raise OSError(f"{method} {path}: {error!r}") from error
                continue  # the API server has closed it, or is another one
            self._idle.append(connection)
            return answer.status, text

    def get(self, path: str) -> Json | None:
        """Read an object; None if there is none."""
        try:
            found: Json = self.request("GET", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return found

    def create(self, path: str, value: Json) -> Json:
        created: Json = self.request("POST", path, value)
        return created

    def merge(self, path: str, value: Json) -> Json:
        merged: Json = self.request("PATCH", path, value, "application/merge-patch+json")
        return merged

    def delete(self, path: str) -> None:
        self.request("DELETE", path)

    def install(self, manifest: Path) -> None:
        """Apply all objects of a file, and wait for CRDs to be served."""
        for value in yaml.safe_load_all(manifest.read_text()):
            if value:
                self.apply(value)

    def apply(self, value: Json) -> None:
        group, _, version = value["apiVersion"].rpartition("/")
        base = f"/apis/{group}/{version}" if group else f"/api/{version}"
        namespace = value["metadata"].get("namespace")
        where = f"{base}/namespaces/{namespace}" if namespace else base
        path = f"{where}/{_plural(value['kind'])}/{value['metadata']['name']}"
        self.request("PATCH", f"{path}?fieldManager=test&force=true", value, "application/apply-patch+yaml")
        if value["kind"] == "CustomResourceDefinition":
            spec = value["spec"]
            for each in spec["versions"]:
                self.until_served(f"/apis/{spec['group']}/{each['name']}/{spec['names']['plural']}")

    def until_served(self, path: str) -> None:
        end = time.monotonic() + 30
        while self.get(path) is None:
            assert time.monotonic() < end, path
            time.sleep(0.05)

    def node(self, name: str = "n1", **labels: str) -> Json:
        metadata = {"name": name, "labels": labels}
        return self.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata})

    def pod(self, name: str, uid_of: str = "default", node: str = "n1") -> Json:
        """Create a pod that is bound to a node."""
        spec = {"nodeName": node, "containers": [{"name": "main", "image": "x"}]}
        value = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        return self.create(f"/api/v1/namespaces/{uid_of}/pods", value)


def bound_token(api: AdminApiClient, node: str = "n1") -> str:
    """Return the token of the agent's pod on a node, as kubelet would request it."""
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    name = f"agent-{node}"
    pod = api.get(f"{pods}/{name}") or api.create(
        pods,
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "nodeName": node,
                "serviceAccountName": "topoproxy-agent",
                "automountServiceAccountToken": False,
                "hostNetwork": True,  # so that a real node needs no network for pods
                "containers": [{"name": "agent", "image": "localhost/pause:1", "imagePullPolicy": "Never"}],
            },
        },
    )
    bound = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": pod["metadata"]["uid"]}
    created = api.create(
        f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/topoproxy-agent/token",
        {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"boundObjectRef": bound}},
    )
    return str(created["status"]["token"])


def _plural(kind: str) -> str:
    word = kind.lower()
    if word.endswith("y"):
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith("s") else f"{word}s"
