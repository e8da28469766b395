"""Reports pods that kubelet has not given: whether their containers ask for devices is not known."""

from __future__ import annotations

from proxy.engine.enforcement import applies_to
from proxy.executor.node_executor import NodeExecutor
from proxy.model.workload import Pod
from proxy.telemetry import metrics

DEVICES_UNKNOWN = "cannot find out whether a container asks for devices: kubelet has not given its pod"


class UnreportedPods:
    """Keeps a problem for each such pod until kubelet gives it, or it is gone.

    Attributes:
        refs: Key to name of the pods that have a problem.
    """

    def __init__(self, executor: NodeExecutor) -> None:
        """Begin without such pods.

        Args:
            executor: The node.
        """
        self._executor = executor
        self.refs: dict[str, str] = {}

    def includes(self, pod: Pod, name: str) -> bool:
        """Return whether a container would be created without devices that it may ask for, and report that.

        What it holds already it gets all the same.

        Args:
            pod: The pod, after kubelet was queried for it.
            name: The container.
        """
        executor = self._executor
        state = executor.state
        devices = state.devices
        unknown = pod.asks is None and bool(devices.registered) and applies_to(state, pod)
        unknown = unknown and not devices.held.get(pod.key, {}).get(name)
        if unknown:
            self.refs[pod.key] = pod.ref
            executor.telemetry.count(metrics.CREATES_DEVICES_UNKNOWN)
            executor.telemetry.problem(DEVICES_UNKNOWN, pod=pod.ref)
        return unknown

    def end_others(self) -> None:
        """End the problems of pods that kubelet has given by now, and of those that are gone."""
        executor = self._executor
        known = {each.key: each for each in executor.state.pods.values()}
        for key, ref in list(self.refs.items()):
            each = known.get(key)
            if each is None or each.asks is not None or not executor.state.devices.registered:
                del self.refs[key]
                end = executor.telemetry.forget if each is None else executor.telemetry.resolved
                end(DEVICES_UNKNOWN, pod=ref)
