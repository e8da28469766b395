"""An API server in memory: collections, lists in pages, watches, applies, and its failures."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx2
from lightkube import KubeConfig
from lightkube.config.models import User

from proxy.agent.api_client import APPLY_PATCH, ApiClient

if TYPE_CHECKING:
    from lightkube.config.kubeconfig import SingleConfig

Json = dict[str, Any]


def credentials() -> SingleConfig:
    config = KubeConfig.from_one(
        cluster=KubeConfig.from_server("http://api").clusters["default"], user=User(token="token")
    )
    found = config.get()
    assert found is not None
    return found


def _merged(before: Json, after: Json) -> Json:
    """Merge maps at any depth; everything else is replaced."""
    found = {**before, **after}
    for key in before.keys() & after.keys():
        if isinstance(before[key], dict) and isinstance(after[key], dict):
            found[key] = _merged(before[key], after[key])
    return found


def _line(event: Json) -> bytes:
    """Return an event of a watch; Go's encoding/json leaves characters such as U+0085 as they are."""
    return json.dumps(event, ensure_ascii=False).encode() + b"\n"


class _Lines(httpx2.AsyncByteStream):
    def __init__(self, queue: asyncio.Queue[bytes | Exception | None]) -> None:
        self._queue = queue

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self._queue.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def aclose(self) -> None:
        return


class FakeApi(httpx2.AsyncBaseTransport):
    """The transport of a client; no sockets.

    Attributes:
        collections: The paths that are served; objects by name, or ``namespace/name``.
        requests: Counts by method and path.
        answers: Status codes for the next requests of a path, which are not processed then.
        retry_after: The header ``Retry-After`` of these answers; empty for none.
        down: Whether no connection is possible.
        page: The maximum number of objects in a page.
        groups: The versions of APIs by group.
        oldest: Watches from before this version get 410.
    """

    def __init__(self, *collections: str) -> None:
        self.collections: dict[str, dict[str, Json]] = {path: {} for path in collections}
        self.requests: Counter[tuple[str, str]] = Counter()
        self.received: list[httpx2.Request] = []
        self.answers: dict[str, list[int]] = defaultdict(list)
        self.retry_after = ""
        self.down = False
        self.page = 1000
        self.groups: dict[str, list[str]] = {}
        self.version = 100
        self.oldest = 0
        self._views: tuple[str, ...] = ()
        self._log: list[tuple[int, str, str, Json]] = []
        self._watches: list[tuple[str, asyncio.Queue[bytes | Exception | None]]] = []

    def client(self) -> ApiClient:
        return ApiClient(credentials, self)

    # -- what a test does ---------------------------------------------------------------------------------

    def put(self, path: str, name: str, **fields: Any) -> Json:
        there = self.collections[path]
        kind = "MODIFIED" if name in there else "ADDED"
        metadata = {**fields.pop("metadata", {}), "name": name.rpartition("/")[2]}
        if "/" in name:
            metadata["namespace"] = name.partition("/")[0]
        there[name] = {**fields, "metadata": metadata}
        self._event(kind, path, there[name])
        return there[name]

    def views(self, *paths: str) -> None:
        """Serve the same objects in several versions of one collection."""
        self._views = paths
        for path in paths[1:]:
            self.collections[path] = self.collections[paths[0]]

    def remove(self, path: str, name: str) -> None:
        self._event("DELETED", path, self.collections[path].pop(name))

    def bookmark(self, path: str) -> None:
        self.version += 1
        item = {"metadata": {"resourceVersion": str(self.version)}}
        self._send(path, {"type": "BOOKMARK", "object": item})

    def error(self, path: str, code: int) -> None:
        """Send an ERROR event to the watches of a collection."""
        self._send(path, {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "expired"}})

    def send_line(self, path: str, line: bytes) -> None:
        """Send bytes to the watches of a collection."""
        for where, queue in self._watches:
            if where == path:
                queue.put_nowait(line)

    def end_watches(self, error: Exception | None = None) -> None:
        watches, self._watches = self._watches, []
        for _, queue in watches:
            queue.put_nowait(error)

    def crash(self) -> None:
        self.down = True
        self.end_watches(httpx2.ReadError("connection reset"))

    @property
    def watches(self) -> int:
        return len(self._watches)

    def count(self, method: str, path: str = "") -> int:
        return sum(
            n for (verb, where), n in self.requests.items() if verb == method and where.startswith(path)
        )

    # -- the server ---------------------------------------------------------------------------------------

    def _event(self, kind: str, path: str, item: Json) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        for view in self._views if path in self._views else (path,):
            self._log.append((self.version, view, kind, copy.deepcopy(item)))
            self._send(view, {"type": kind, "object": item})

    def _send(self, path: str, event: Json) -> None:
        self.send_line(path, _line(event))

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.down:
            raise httpx2.ConnectError("connection refused")
        path = request.url.path
        self.requests[request.method, path] += 1
        self.received.append(request)
        if self.answers[path]:
            code = self.answers[path].pop(0)
            headers = {"Retry-After": self.retry_after} if self.retry_after else {}
            message = {"message": f"it is {code}", "reason": "Scripted"}
            return httpx2.Response(code, headers=headers, json=message)
        if path == "/apis":
            groups = [
                {"name": name, "versions": [{"version": each} for each in versions]}
                for name, versions in self.groups.items()
            ]
            return httpx2.Response(200, json={"groups": groups})
        if path.removeprefix("/apis/") in self.groups:
            versions = [{"version": each} for each in self.groups[path.removeprefix("/apis/")]]
            return httpx2.Response(200, json={"kind": "APIGroup", "versions": versions})
        if request.method == "GET" and path in self.collections:
            return self._watch(request) if "watch" in request.url.params else self._list(request)
        collection, name = self._split(path)
        if collection is None:
            return httpx2.Response(404, json={"message": "the server could not find the resource"})
        body = json.loads(request.content) if request.content else {}
        if request.headers.get("Content-Type", "").startswith(APPLY_PATCH) and not path.endswith("/status"):
            fields = {f"f:{part}": {} for part in body}
            owner = {"manager": request.url.params["fieldManager"], "operation": "Apply", "fieldsV1": fields}
            self._record_field_owner(body, owner, self.collections[collection].get(name, {}))
        return self._handle_object(request.method, collection, name, body)

    def _record_field_owner(self, body: Json, owner: Json, before: Json) -> None:
        """Record the owner of applied fields."""
        others = [
            each
            for each in before.get("metadata", {}).get("managedFields", [])
            if each["manager"] != owner["manager"]
        ]
        body["metadata"]["managedFields"] = [*others, owner]

    def _split(self, path: str) -> tuple[str | None, str]:
        for collection in sorted(self.collections, key=len, reverse=True):
            if path.startswith(f"{collection}/") or path == collection:
                return collection, path[len(collection) :].strip("/")
        head, found, rest = path.partition("/namespaces/")
        if found:
            namespace, _, more = rest.partition("/")
            plural, _, name = more.partition("/")
            if f"{head}/{plural}" in self.collections:
                return f"{head}/{plural}", f"{namespace}/{name}".removesuffix("/")
        return None, ""

    def _handle_object(self, method: str, collection: str, name: str, body: Json) -> httpx2.Response:
        there = self.collections[collection]
        if name.endswith("/status"):
            name = name.removesuffix("/status")
            if name not in there:
                return httpx2.Response(404, json={"message": "not found"})
        if method == "POST" and name.endswith("/eviction"):
            name, uid = name.removesuffix("/eviction"), body["deleteOptions"]["preconditions"]["uid"]
            if name not in there:
                return httpx2.Response(404, json={"message": "not found"})
            if there[name]["metadata"]["uid"] != uid:
                return httpx2.Response(409, json={"message": "the uid in the precondition differs"})
            self.remove(collection, name)
            return httpx2.Response(201, json={"kind": "Status"})
        if method == "POST":
            name = f"{name}/{body['metadata']['name']}".strip("/")
        elif method != "PATCH" and name not in there:
            return httpx2.Response(404, json={"message": "not found"})
        if method == "DELETE":
            self.remove(collection, name)
            return httpx2.Response(200, json={"kind": "Status"})
        if isinstance(body, list):
            self._apply_json_patch(there[name], body)
            self.put(collection, name, **there[name])
        elif method in ("PATCH", "POST"):
            before = there.get(name, {})
            after = _merged(before, body)
            if after != before:
                self.put(collection, name, **after)
        return httpx2.Response(200, json=there[name])

    def _apply_json_patch(self, item: Json, operations: list[Json]) -> None:
        """Apply a JSON patch that only adds."""
        for each in operations:
            *parts, last = each["path"].strip("/").split("/")
            at = item
            for part in parts:
                at = at[part]
            at[last.replace("~1", "/")] = each["value"]

    def _list(self, request: httpx2.Request) -> httpx2.Response:
        items = list(self.collections[request.url.path].values())
        start = int(request.url.params.get("continue", 0))
        end = start + min(self.page, int(request.url.params.get("limit", self.page)))
        more = {"continue": str(end)} if end < len(items) else {}
        metadata = {"resourceVersion": str(self.version), **more}
        return httpx2.Response(
            200, json={"kind": "ThingList", "metadata": metadata, "items": items[start:end]}
        )

    def _watch(self, request: httpx2.Request) -> httpx2.Response:
        path, since = request.url.path, int(request.url.params["resourceVersion"])
        if since < self.oldest:
            return httpx2.Response(410, json={"message": "too old resource version", "reason": "Expired"})
        queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        for version, where, kind, item in self._log:
            if where == path and version > since:
                queue.put_nowait(_line({"type": kind, "object": item}))
        self._watches.append((path, queue))
        return httpx2.Response(200, stream=_Lines(queue))
