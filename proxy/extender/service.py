"""Answers the verbs of a scheduler extender (k8s.io/kube-scheduler v0.36 extender/v1 types.go).

kube-scheduler sends the pod and the names of the nodes that its own plugins have left (``nodeCacheCapable``).

- *filter* keeps those that would admit the pod.
- *prioritize* scores them, 0 to 10.
- *bind* decides again for the one node, with the CPUs themselves, assumes the pod on them, and creates the
  Binding. The same request writes the CPUs of LSE and LSR pods (Koordinator's latency-sensitive exclusive and
  reserved) as the annotation ``resource-status``, so the pod is never bound without the annotation.
- *preempt* names victims that make room on one NUMA node. Other requests are answered between two nodes.
  Nodes that were not examined after ``PREEMPT_S`` are left out: kube-scheduler preempts on one of the other
  nodes, or tries again.

A request that cannot be decided is answered with an error, and kube-scheduler tries the pod again.
If the answer to a bind is lost, the pod stays assumed until its state is known: either the watch shows it as
bound, or it is read as not bound at a time when the request can no longer have an effect.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from proxy.agent.api_client import ApiClient, ApiServerError, retry_after
from proxy.agent.watcher import SILENCE_S
from proxy.extender.arguments import (
    ExtenderArgs,
    decoded,
    node_names,
    proposed_victims,
    text_of,
    value_of,
)
from proxy.extender.cluster_view import ClusterView
from proxy.extender.http_server import HttpAnswer
from proxy.extender.lease import Lease
from proxy.extender.retries import PodRetries
from proxy.extender.waiting_pods import WaitingPods
from proxy.model.admission import AdmissionRule
from proxy.model.errors import InputError, TopoproxyError, UnavailableError
from proxy.pools.annotations import RESOURCE_STATUS
from proxy.pools.claims import STRICT
from proxy.scheduler.advice import choose_victims
from proxy.scheduler.assumed_pods import LOST_S, AssumedPod
from proxy.scheduler.decision import NOT_STATIC, OTHER_POLICY, REORDERED, resource_status
from proxy.scheduler.node_table import UNKNOWN, NodeTable
from proxy.scheduler.pod_demand import PodDemand, read_demand, with_cpus
from proxy.scheduler.scores import Strategy
from proxy.telemetry import metrics
from proxy.telemetry.exposition import family
from proxy.telemetry.port import Telemetry
from proxy.telemetry.registry import Metric, Registry

BIND_S = 5
"""Seconds for a bind: less than the margin of the lease; the API server gives up after the same time."""
SETTLED_S = 3 * BIND_S
"""Seconds after which a bind without an answer has taken effect or never will: the API server works on it for
up to BIND_S, and etcd for up to 7 seconds more (etcd v3.6 server/config/config.go, ReqTimeout)."""
SETTLE_RETRY_S = 1.0
PREEMPT_S = 2.0
"""Seconds after which a search for victims ends, with the nodes that it has examined: much less than the
httpTimeout of deploy/scheduler, after which kube-scheduler drops the answer."""
CONCURRENT_BINDS = 16
"""The most binds at the same time: as many connections to the API server stay open."""
STALE_S = SILENCE_S + 10.0
"""Seconds after which a copy is too old for decisions: quiet watches are reopened before that."""
MOST_DEMANDS = 20_000
MOST_DECODED = 64
OPEN_PAGES = ("/healthz", "/livez", "/readyz", "/metrics")
UNRESOLVABLE = (UNKNOWN, NOT_STATIC, OTHER_POLICY, AdmissionRule.NAMESPACE.reason)
"""Reasons that persist whichever pods end."""


_SCALE = 10
"""An extender's highest score is 10 for kube-scheduler, and 100 for us."""


class CannotDecideError(UnavailableError):
    """This replica cannot decide now."""


class ExtenderService:
    """Answers kube-scheduler."""

    def __init__(
        self,
        api: ApiClient,
        table: NodeTable,
        view: ClusterView,
        lease: Lease,
        retries: PodRetries,
        telemetry: Telemetry,
        strategy: Strategy,
    ) -> None:
        """Create and connect the parts.

        Args:
            api: The API server.
            table: The nodes.
            view: Keeps the table current.
            lease: Says whether this replica may bind.
            retries: Makes kube-scheduler try unschedulable pods again.
            telemetry: The log.
            strategy: How nodes that fit are ordered.
        """
        self._api = api
        self._table = table
        self._view = view
        self._lease = lease
        self._retries = retries
        self._telemetry = telemetry
        self._strategy = strategy
        self._demand_by_json: OrderedDict[bytes, PodDemand] = OrderedDict()
        self._demand_by_uid: OrderedDict[str, PodDemand] = OrderedDict()
        self._waiting = WaitingPods(table)
        self._registry = Registry((metrics.EXTENDER_REQUESTS, metrics.EXTENDER_REQUEST_SECONDS))
        self._binding = asyncio.Semaphore(CONCURRENT_BINDS)
        self._resolving: set[asyncio.Future[None]] = set()
        self._verbs = {
            "/filter": self._filter,
            "/prioritize": self._prioritize,
            "/bind": self._bind,
            "/preempt": self._preempt,
        }
        self.draining = False

    async def handle(self, method: str, target: str, body: bytes, trusted: bool) -> HttpAnswer:
        """Answer a request; only probes and metrics are for clients that are not trusted."""
        path, _, query = target.partition("?")
        if not trusted and path not in OPEN_PAGES:
            return HttpAnswer("a certificate signed by the CA in --client-ca is needed\n", 403)
        if method == "GET":
            return await self._page(path, query)
        verb = self._verbs.get(path)
        if verb is None or method != "POST":
            return HttpAnswer(f"not found; available: {', '.join(self._verbs)}\n", 404)
        began, result = time.perf_counter(), "error"
        try:
            self._check_may_decide()
            answer = await verb(decoded(body))
            has_failed = isinstance(answer.value, dict) and answer.value.get("Error")
            result = "error" if has_failed else "ok"
        except CannotDecideError as error:
            self._telemetry.frequent("a request was not answered", method=path[1:], reason=str(error))
            answer = HttpAnswer(f"{error}\n", 503)
        except InputError as error:
            answer = HttpAnswer({"Error": str(error)} if path != "/prioritize" else f"{error}\n", 200)
            answer = answer if path in ("/filter", "/bind") else HttpAnswer(f"{error}\n", 400)
        labels = {"verb": path[1:]}
        self._registry.observe(metrics.EXTENDER_REQUEST_SECONDS, time.perf_counter() - began, labels)
        self._registry.add(metrics.EXTENDER_REQUESTS, 1, {**labels, "result": result})
        return answer

    # -- verbs --------------------------------------------------------------------------------------------

    async def _filter(self, args: ExtenderArgs) -> HttpAnswer:
        demand = self._demand(args)
        result = self._table.filter(demand, node_names(args))
        self._retries.record_retried(demand.key)
        if result.fits:
            self._waiting.record_placed(demand.key)
        else:
            self._waiting.record_unschedulable(demand)
        failed: dict[str, dict[str, str]] = {"FailedNodes": {}, "FailedAndUnresolvableNodes": {}}
        for name, cause in result.failed.items():
            reason = cause.partition(":")[0]
            kind = "FailedAndUnresolvableNodes" if reason in UNRESOLVABLE else "FailedNodes"
            failed[kind][name] = reason
        if not result.fits and (cause := self._reason_to_try_again(node_names(args), failed["FailedNodes"])):
            # No event follows when this cause ends; after an error kube-scheduler asks again by itself.
            return HttpAnswer({"Error": f"cannot decide on {demand.ref}: {cause}"})
        if not result.fits:
            self._retries.record_unschedulable(demand)
        return HttpAnswer({"NodeNames": result.fits, **failed, "Error": ""})

    async def _prioritize(self, args: ExtenderArgs) -> HttpAnswer:
        names = node_names(args)
        scores = self._table.scores(self._demand(args), names, self._strategy)
        if len(set(scores)) < 2:
            return HttpAnswer([])  # only differences count, and a thousand equal scores take a millisecond
        return HttpAnswer(
            [{"Host": name, "Score": score // _SCALE} for name, score in zip(names, scores, strict=True)]
        )

    async def _bind(self, args: ExtenderArgs) -> HttpAnswer:
        async with self._binding:
            self._check_may_decide()
            return await self._bind_one(args)

    async def _bind_one(self, args: ExtenderArgs) -> HttpAnswer:
        namespace, name = text_of(args, "PodNamespace"), text_of(args, "PodName")
        uid, node = text_of(args, "PodUID"), text_of(args, "Node")
        demand = self._demand_by_uid.get(uid) or await self._read_pod(namespace, name, uid)
        before = self._table.assumed_pod(uid)
        if before is not None and before.bound:
            return HttpAnswer({"Error": f"cannot bind {demand.ref} to {node}: it is bound to {before.node}"})
        verdict = self._table.place(node, demand)
        if not verdict.fits:
            return HttpAnswer({"Error": f"cannot bind {demand.ref} to {node}: {verdict.message}"})
        annotations: dict[str, str] = {}
        if demand.pod.qos in STRICT and verdict.cpus:
            facts = self._table.node(node)
            assert facts is not None
            annotations[RESOURCE_STATUS] = resource_status(facts, verdict)
            demand = with_cpus(demand, annotations[RESOURCE_STATUS])
        self._table.assume(node, demand, asyncio.get_running_loop().time())
        problem = await self._create_binding(demand, node, annotations)
        if not problem:
            self._waiting.record_placed(uid)
            self._demand_by_uid.pop(uid, None)
        return HttpAnswer({"Error": problem})

    async def _preempt(self, args: ExtenderArgs) -> HttpAnswer:
        demand = self._demand(args)
        proposed = proposed_victims(args)
        answer = {}
        loop = asyncio.get_running_loop()
        began = loop.time()
        for name, victims in proposed.items():
            uids = [victim.uid for victim in (victims.pods if victims else None) or ()]
            chosen_uids = self._victims(name, demand, uids)
            if chosen_uids is not None:
                pods = [{"UID": uid} for uid in chosen_uids]
                answer[name] = {"Pods": pods, "NumPDBViolations": victims.violations if victims else 0}
            if loop.time() - began > PREEMPT_S:
                break
            await asyncio.sleep(0)
        return HttpAnswer({"NodeNameToMetaVictims": answer})

    # -- inside -------------------------------------------------------------------------------------------

    def _check_may_decide(self) -> None:
        """Check that this replica may decide.

        Raises:
            CannotDecideError: It may not.
        """
        age = self._view.age
        if self.draining:
            raise CannotDecideError("cannot decide: this replica is shutting down")
        self._check_lease()
        if age is None:
            raise CannotDecideError("cannot decide: the cluster has not been read yet")
        if age > STALE_S:
            raise CannotDecideError(f"cannot decide: the copy of the cluster is {age:.0f} seconds old")

    def _check_lease(self) -> None:
        if not self._lease.is_held:
            raise CannotDecideError("cannot decide: another replica holds the lease, or it cannot be renewed")

    def _reason_to_try_again(self, names: list[str], failed: Mapping[str, str]) -> str:
        """Return why a pod that fits nowhere may fit soon; empty if it will not."""
        if REORDERED in failed.values():
            return "whether it fits depends on pods that are bound and that their nodes do not show yet"
        possible = [name for name in names if name in failed]
        if self._table.shows_ended(possible, asyncio.get_running_loop().time()):
            return "a node still shows CPUs of a pod that has ended"
        if self._table.awaits_object(names, asyncio.get_running_loop().time()):
            return "no object describes a node that has just joined"
        return ""

    def _demand(self, args: ExtenderArgs) -> PodDemand:
        # kube-scheduler sends the same bytes with filter and prioritize.
        sent = bytes(args.get("Pod", b"null"))
        demand = self._demand_by_json.get(sent)
        if demand is None:
            pod = value_of(args, "Pod")
            if not isinstance(pod, dict):
                raise InputError("cannot read the request: Pod is missing")
            demand = self._demand_by_json[sent] = read_demand(pod)
            _drop_oldest(self._demand_by_json, MOST_DECODED)
        self._demand_by_uid[demand.key] = demand
        self._demand_by_uid.move_to_end(demand.key)
        _drop_oldest(self._demand_by_uid, MOST_DEMANDS)
        return demand

    async def _read_pod(self, namespace: str, name: str, uid: str) -> PodDemand:
        """Read a pod that was filtered before this replica began."""
        try:
            async with asyncio.timeout(BIND_S):
                demand = read_demand(await self._api.get(f"/api/v1/namespaces/{namespace}/pods/{name}"))
        except (TopoproxyError, TimeoutError) as error:
            raise InputError(f"cannot read the pod {namespace}/{name}: {error or 'no answer'}") from error
        if demand.key != uid:
            raise InputError(f"cannot bind {namespace}/{name}: it was replaced by a pod of that name")
        self._check_may_decide()
        return demand

    async def _create_binding(self, demand: PodDemand, node: str, annotations: Mapping[str, str]) -> str:
        """Create the Binding; return why that failed, or an empty text if it succeeded."""
        namespace, name = demand.spec.namespace, demand.spec.name
        metadata = {"name": name, "namespace": namespace, "uid": demand.key, "annotations": dict(annotations)}
        value = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        try:
            async with asyncio.timeout(BIND_S):
                path = f"/api/v1/namespaces/{namespace}/pods/{name}/binding"
                # If this process was paused here, another replica may hold the lease by now.
                await self._api.create(path, value, within=BIND_S, check=self._check_lease)
        except CannotDecideError:
            self._table.release(demand.key, asyncio.get_running_loop().time())
            raise
        except ApiServerError as error:
            if error.status == 409:  # an earlier bind without an answer may have taken effect
                self._resolve_later(demand, settled=True)
            elif error.status < 500 and error.status != 408:
                self._table.release(demand.key, asyncio.get_running_loop().time())
            else:
                self._resolve_later(demand)
            return f"cannot bind {demand.ref} to {node}: {error}"
        except (TopoproxyError, TimeoutError) as error:
            self._resolve_later(demand)
            return f"cannot bind {demand.ref} to {node}: {str(error) or 'the API server does not answer'}"
        return ""

    def _resolve_later(self, demand: PodDemand, *, settled: bool = False) -> None:
        """Find out later whether a pod is bound; until then it is assumed.

        Args:
            demand: The pod.
            settled: Whether the API server has answered the last bind.
        """
        assumed = self._table.assumed_pod(demand.key)
        task = asyncio.ensure_future(self._resolve_bind(demand, assumed, 0.0 if settled else SETTLED_S))
        self._resolving.add(task)
        task.add_done_callback(self._resolving.discard)

    async def _resolve_bind(self, demand: PodDemand, assumed: AssumedPod | None, seconds: float) -> None:
        """Forget the assumed pod if its bind did not take effect; record the pod if it is bound.

        The watch may have shown the bind before the pod was assumed on another node.
        If the API server does not answer, the assumed pod is forgotten after ``LOST_S``.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + LOST_S
        await asyncio.sleep(seconds)
        path = f"/api/v1/namespaces/{demand.spec.namespace}/pods/{demand.spec.name}"
        while loop.time() < end and self._table.assumed_pod(demand.key) is assumed:
            try:
                async with asyncio.timeout(BIND_S):
                    found = read_demand(await self._api.get(path))
            except (TopoproxyError, TimeoutError) as error:
                if not (isinstance(error, ApiServerError) and error.status == 404):
                    await asyncio.sleep(max(SETTLE_RETRY_S, retry_after(error)))
                    continue
                found = None
            if self._table.assumed_pod(demand.key) is assumed:
                if found is not None and found.key == demand.key and found.node:
                    self._table.observe(found, loop.time(), running=False)
                else:
                    self._table.release(demand.key, loop.time())
            return

    def _victims(self, name: str, demand: PodDemand, proposed: list[str]) -> tuple[str, ...] | None:
        node = self._table.node(name)
        if not demand.needs_alignment:
            return tuple(proposed)
        if node is None:
            return None
        pending = {assumed.pod for assumed in self._table.pending(name)}
        return choose_victims(node, demand, self._table.pods(name), proposed, pending)

    # -- pages --------------------------------------------------------------------------------------------

    async def _page(self, path: str, query: str) -> HttpAnswer:
        if path in ("/healthz", "/livez"):
            return HttpAnswer("ok\n")
        if path == "/readyz":
            try:
                self._check_may_decide()
            except CannotDecideError as error:
                return HttpAnswer(f"{error}\n", 503)
            return HttpAnswer("ok\n")
        if path == "/metrics":
            return HttpAnswer(self._metrics())
        if path == "/advice":
            return HttpAnswer(await self._waiting.advice(dict(parse_qsl(query)).get("pod", "")))
        return HttpAnswer("not found; available: /healthz, /livez, /readyz, /metrics, /advice\n", 404)

    def _metrics(self) -> str:
        table = self._table
        names = list(table.names())
        known_nodes = sum(table.node(name) is not None for name in names)
        pending = sum(len(table.pending(name)) for name in names)
        age = self._view.age
        read: dict[Metric, list[tuple[dict[str, object], float]]] = {
            metrics.EXTENDER_LEADER: [({}, float(self._lease.is_held))],
            metrics.EXTENDER_VIEW_AGE_SECONDS: [({}, age)] if age is not None else [],
            metrics.EXTENDER_NODES: [
                ({"state": "known"}, known_nodes),
                ({"state": "unknown"}, len(names) - known_nodes),
            ],
            metrics.EXTENDER_PENDING_PODS: [({}, pending)],
            metrics.EXTENDER_EVALUATIONS: [({}, table.evaluations)],
        }
        families = (family(metric, samples) for metric, samples in read.items())
        return "".join([self._registry.text(), *families])


def _drop_oldest(cache: OrderedDict[Any, PodDemand], most: int) -> None:
    while len(cache) > most:
        cache.popitem(last=False)
