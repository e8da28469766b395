"""The parts of the extender with an API server in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import httpx2

from proxy import logs
from proxy.extender.cluster_view import ClusterView
from proxy.extender.lease import Lease
from proxy.extender.retries import PodRetries
from proxy.extender.service import ExtenderService
from proxy.scheduler.node_table import NodeTable
from proxy.scheduler.scores import Strategy
from tests.agent.fake_api import FakeApi
from tests.scheduler.objects import Json, numatopology, pod
from tests.testkit.waiting import until

PODS, NODES = "/api/v1/pods", "/api/v1/nodes"
NUMATOPOLOGIES = "/apis/nodeinfo.volcano.sh/v1alpha1/numatopologies"
TOPOLOGIES = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
CAPACITIES = "/apis/storage.k8s.io/v1/namespaces/default/csistoragecapacities"


class ClusterApi(FakeApi):
    """An API server with bindings and optimistic locking."""

    def __init__(self) -> None:
        super().__init__(PODS, NODES, NUMATOPOLOGIES, TOPOLOGIES, LEASES, CAPACITIES)
        self.bindings: list[Json] = []
        self.bind_status = 201
        self.bind_limits: list[str] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        content = await request.aread()
        body = json.loads(content) if content else {}
        if request.url.path.endswith("/binding") and not self.down:
            self.bind_limits.append(request.url.params["timeout"])
            if self.bind_status >= 400:
                return httpx2.Response(self.bind_status, json={"message": "as the test wants it"})
            self.bindings.append(body)
            return httpx2.Response(201, json={"kind": "Status"})
        if request.method == "PATCH" and request.url.path.startswith(LEASES):
            found = self.collections[LEASES].get(request.url.path.rpartition("/")[2])
            if found is None:
                return httpx2.Response(404, json={"message": "not found"})
            if found["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
                return httpx2.Response(409, json={"message": "the object has been modified"})
        return await super().handle_async_request(request)

    def add_node(self, name: str, **more: Any) -> None:
        self.put(NODES, name, status={"allocatable": {"cpu": "15", "memory": "64Gi"}})
        self.put(
            NUMATOPOLOGIES, name, spec=numatopology(name, **{"pods": {}, "free": "1-15", **more})["spec"]
        )

    def add_pod(self, raw: Json) -> None:
        self.put(PODS, f"default/{raw['metadata']['name']}", **raw)


class RunningExtender:
    """A service that holds the lease and watches the API server."""

    def __init__(self, api: ClusterApi, strategy: Strategy = Strategy.FEWEST_NUMA_NODES) -> None:
        self.api = api
        telemetry = logs.telemetry()
        client = api.client()
        self.table = NodeTable()
        self.lease = Lease(client, "default", "extender", "me", telemetry)
        self.view = ClusterView(client, self.table, telemetry)
        self.retries = PodRetries(client, self.table, "default", "extender", telemetry)
        self.service = ExtenderService(
            client, self.table, self.view, self.lease, self.retries, telemetry, strategy
        )

    async def hold_lease(self) -> None:
        """Hold the lease for as long as the test takes."""
        await self.lease.acquire()
        self.lease._until = inf

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        await self.hold_lease()
        task = asyncio.ensure_future(self.view.run())
        try:
            await until(lambda: self.view.listed and self.api.watches >= 4)
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def call(self, verb: str, **body: Any) -> Any:
        answer = await self.service.handle("POST", f"/{verb}", json.dumps(body).encode(), True)
        return answer.value if answer.status == 200 else (answer.status, answer.value)

    async def filter(self, raw: Json, *names: str) -> list[str]:
        answer = await self.call("filter", Pod=raw, NodeNames=list(names))
        assert answer["Error"] == ""
        found: list[str] = answer["NodeNames"]
        return found

    async def bind(self, raw: Json, node: str) -> str:
        metadata = raw["metadata"]
        answer = await self.call(
            "bind", PodName=metadata["name"], PodNamespace="default", PodUID=metadata["uid"], Node=node
        )
        return str(answer["Error"])

    async def get(self, path: str) -> tuple[int, Any]:
        answer = await self.service.handle("GET", path, b"", True)
        return answer.status, answer.value


def scheduler_pod(name: str, cpus: int, **more: Any) -> Json:
    """Return a pod as kube-scheduler sends it: without kind."""
    raw = pod(name, cpus, **more)
    return {key: value for key, value in raw.items() if key not in ("kind", "apiVersion")}
