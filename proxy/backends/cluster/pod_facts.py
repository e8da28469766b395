"""Find the requests of this node's pods: first in the cluster agent's file, then at kubelet.

kubelet calls the runtime some time after the API server has bound a pod to the node, and the agent sees the
binding at the same time as kubelet. So the facts of a pod are usually in the agent's file before its sandbox
is requested. Reading them takes no request to another process, only a ``stat``, and a read after a change. If
a pod is not in the file, or the file is not current, kubelet is queried, if that is configured. If kubelet
has no answer, an old file is still better than nothing, because only the resources of a pod can change while
it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec.structs import replace

from proxy.backends.cluster.facts_format import FactsFile, FactsKind
from proxy.backends.kubelet.pods import PodIndex, find_pod, index_pods
from proxy.executor.ports import Kubelet
from proxy.model.errors import InputError
from proxy.model.idset import Mask
from proxy.model.requests import PodRequests
from proxy.model.workload import LocatedDevice
from proxy.pools.pod_spec import pod_spec
from proxy.telemetry.port import Report

SOURCE = "the cluster agent"


class ClusterPods(FactsFile[PodIndex]):
    """This node's pods."""

    def __init__(self, directory: Path, wall_clock: Callable[[], float] = time.time) -> None:
        """Set the directory of the agent's files."""
        super().__init__(directory, FactsKind.PODS, lambda facts: index_pods(facts.items), wall_clock)


class PodFactSources:
    """Implements ``proxy.executor.ports.Kubelet``: from the agent's file first; safe for threads."""

    def __init__(self, pods: ClusterPods, kubelet: Kubelet | None, report_problem: Report) -> None:
        """Set the sources.

        Args:
            pods: The pods that the agent has read.
            kubelet: kubelet, which is queried next; None if it cannot be queried.
            report_problem: Takes a message that says why a fact is not available.
        """
        self._pods = pods
        self._kubelet = kubelet
        self._report_problem = report_problem

    @property
    def knows_pods(self) -> bool:
        """Always True: the agent's file exists, or will exist."""
        return True

    @property
    def knows_devices(self) -> bool:
        """True if kubelet can be queried for devices."""
        return self._kubelet is not None and self._kubelet.knows_devices

    def pod_requests(self, uid: str, namespace: str, name: str) -> tuple[PodRequests, str] | None:
        """Find a pod's requests and limits; see ``proxy.executor.ports.Kubelet``."""
        if not uid:
            return None
        index = self._pods.read()
        requests = self._found(index or {}, uid, namespace, name)
        if requests is not None and self._pods.is_current:
            return requests, SOURCE
        kubelet = self._kubelet
        answer = (
            kubelet.pod_requests(uid, namespace, name) if kubelet is not None and kubelet.knows_pods else None
        )
        if answer is None and requests is not None:
            return requests, f"{SOURCE} (not confirmed since)"
        return answer

    def _found(self, index: PodIndex, uid: str, namespace: str, name: str) -> PodRequests | None:
        item = find_pod(index, uid, namespace, name)
        if item is None:
            return None
        try:
            return replace(pod_spec(item, f"{namespace}/{name}", listed=True).requests, uid=uid)
        except InputError as error:
            self._report_problem(
                "cannot use a fact of the cluster", pod=f"{namespace}/{name}", reason=str(error)
            )
            return None

    def devices(self, namespace: str, pod: str, container: str) -> tuple[LocatedDevice, ...] | None:
        """Read the devices that kubelet assigned to a container; see ``proxy.executor.ports.Kubelet``."""
        return None if self._kubelet is None else self._kubelet.devices(namespace, pod, container)

    def allocatable(self) -> Mapping[str, Mapping[str, Mask | None]]:
        """Query kubelet for all devices; empty if kubelet cannot be queried."""
        return {} if self._kubelet is None else self._kubelet.allocatable()

    def close(self) -> None:
        """Close the connections."""
        if self._kubelet is not None:
            self._kubelet.close()
