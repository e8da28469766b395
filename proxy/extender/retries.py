"""Makes kube-scheduler try unschedulable pods again when an object shows room and nothing else changes.

Theory. kube-scheduler sets aside a pod that fits no node according to an extender until there is an event of
any kind that it watches (kubernetes v1.36 pkg/scheduler/schedule_one.go, findNodesThatFitPod, and
pkg/scheduler/framework/types.go, UnrollWildCardResource). The objects that describe nodes are not of these
kinds. If such an object shows more free CPUs although no pod has ended (because a reserve was made smaller),
the unschedulable pod would wait for up to five minutes.

So the extender changes one object of a kind that kube-scheduler watches: a CSIStorageCapacity in the
extender's namespace. Its storage class is one that no volume has, so the object means nothing to any program.
An annotation of the Node object would do as well, but it would go to every client that watches nodes, and the
extender would have to be permitted to change nodes.

The change is made after the object is in the table, so the decision about the retried pod uses the object. A
replica that has just got the lease makes such a change too: it does not know the unschedulable pods of the
former holder.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from datetime import UTC, datetime

from proxy.agent.api_client import ApiClient, retry_after
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import TopoproxyError
from proxy.scheduler.node_table import NodeTable
from proxy.scheduler.pod_demand import PodDemand
from proxy.telemetry.port import Telemetry

MOST_UNSCHEDULABLE = 500
TICK_S = 1.0
CHANGE_INTERVAL_S = 10.0
"""Seconds between two changes: the longest back-off of kube-scheduler."""
DECISION_PAUSE_S = 0.01
"""Seconds after a call of the engine: requests of kube-scheduler go first."""
PAUSES = Backoff(1.0, 60.0)
RETRIED_AT = "topoproxy.io/retried-at"
CANNOT = "cannot make kube-scheduler try unschedulable pods again"


class PodRetries:
    """Makes kube-scheduler try the unschedulable pods again when one of them fits."""

    def __init__(
        self, api: ApiClient, table: NodeTable, namespace: str, name: str, telemetry: Telemetry
    ) -> None:
        """Prepare; nothing is written yet.

        Args:
            api: The API server.
            table: The nodes.
            namespace: Of the object that is changed.
            name: Of the object that is changed.
            telemetry: The log.
        """
        self._api = api
        self._table = table
        self._name = name
        self._path = f"/apis/storage.k8s.io/v1/namespaces/{namespace}/csistoragecapacities/{name}"
        self._telemetry = telemetry
        self._unschedulable: OrderedDict[str, PodDemand] = OrderedDict()

    def record_unschedulable(self, demand: PodDemand) -> None:
        """Record that a pod fits nowhere: kube-scheduler waits for an event."""
        self._unschedulable[demand.key] = demand
        self._unschedulable.move_to_end(demand.key)
        if len(self._unschedulable) > MOST_UNSCHEDULABLE:
            self._unschedulable.popitem(last=False)

    def record_retried(self, pod: str) -> None:
        """Record that kube-scheduler tries a pod again without an event, or has bound it."""
        self._unschedulable.pop(pod, None)

    async def run(self) -> None:
        """Follow the table until cancelled."""
        pauses, is_due = RetryDelays(PAUSES), True
        while True:
            pause = TICK_S
            if is_due or await self._has_fitting_pod():
                failure = await self._change()
                is_due = failure is not None
                if failure is not None:
                    pause = max(pauses.next(), retry_after(failure))
                else:
                    pauses.reset()
                    pause = CHANGE_INTERVAL_S
            await asyncio.sleep(pause)

    async def _has_fitting_pod(self) -> bool:
        """Return whether an unschedulable pod fits a node that has changed."""
        changed, self._table.changed = self._table.changed, set()
        demands = {
            (self._table.signature_of(demand), demand.tolerations): demand
            for demand in self._unschedulable.values()
        }
        for name in changed if demands else ():
            await asyncio.sleep(0)
            for demand in demands.values():
                if self._table.is_tainted(name, demand):
                    continue  # kube-scheduler gets an event when the taint is removed
                verdicts = self._table.verdicts_of(demand)
                verdict = self._table.known_verdict(name, demand, verdicts)
                if verdict is None:
                    verdict = self._table.verdict(name, demand, verdicts)
                    await asyncio.sleep(DECISION_PAUSE_S)
                if verdict.fits:
                    return True
        return False

    async def _change(self) -> TopoproxyError | None:
        """Change the object, so that all unschedulable pods are tried again; return why that failed."""
        before = self._unschedulable
        self._unschedulable = OrderedDict()
        at = datetime.now(UTC).isoformat(timespec="microseconds")
        value = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "CSIStorageCapacity",
            "metadata": {"name": self._name, "annotations": {RETRIED_AT: at}},
            "storageClassName": self._name,
        }
        try:
            await self._api.apply(self._path, value)
        except TopoproxyError as error:
            self._telemetry.problem(CANNOT, err=error)
            self._unschedulable = OrderedDict({**before, **self._unschedulable})
            return error
        self._telemetry.resolved(CANNOT)
        self._telemetry.frequent("made kube-scheduler try unschedulable pods again", count=len(before))
        return None
