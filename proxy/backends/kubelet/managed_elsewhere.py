"""Read the devices of kubelet's device manager and of DRA drivers, from kubelet's pod-resources API.

(DRA: Dynamic Resource Allocation.) ``GetAllocatableResources`` lists the resources of kubelet's device
plugins with their healthy devices; a plugin that has ended has no devices (kubernetes v1.36
pkg/kubelet/cm/devicemanager/manager.go, GetAllocatableDevices). ``List`` has the devices of claims as CDI
(Container Device Interface) names. Their specs lead to device files, and these lead to PCI functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from proxy.backends.kubelet.settings import KubeletError
from proxy.executor.device_manager_conflicts import ManagedElsewhere
from proxy.telemetry.port import Telemetry

if TYPE_CHECKING:
    from proxy.api.kubelet import podresources_pb2 as pb
    from proxy.backends.kubelet.shared_pod_resources import SharedPodResources

PROBLEM = "cannot compare our devices with those of kubelet"
PciFunctionLookup = Callable[[str], Iterable[str]]
"""Returns the addresses of the PCI functions behind a CDI name."""


class OtherManagersReader:
    """Reads from kubelet which devices it manages; call it in a thread."""

    def __init__(
        self, kubelet: SharedPodResources, functions: PciFunctionLookup, telemetry: Telemetry
    ) -> None:
        """Prepare; nothing is requested yet.

        Args:
            kubelet: kubelet's lists.
            functions: Finds the PCI functions of a CDI device.
            telemetry: Takes the problem if kubelet does not answer.
        """
        self._kubelet = kubelet
        self._functions = functions
        self._telemetry = telemetry

    def read(self) -> ManagedElsewhere | None:
        """Return kubelet's report; None if kubelet does not answer."""
        try:
            devices, pods = self._kubelet.allocatable_resources(), self._kubelet.pods()
        except KubeletError as error:
            self._telemetry.problem(PROBLEM, err=error)
            return None
        self._telemetry.resolved(PROBLEM)
        plugged: dict[str, set[str]] = {}
        for group in devices.devices:
            plugged.setdefault(group.resource_name, set()).update(group.device_ids)
        return ManagedElsewhere({name: ids for name, ids in plugged.items() if ids}, self._claimed(pods))

    def _claimed(self, pods: pb.ListPodResourcesResponse) -> dict[str, str]:
        claims: dict[str, str] = {}
        for pod in pods.pod_resources:
            for container in pod.containers:
                for claim in container.dynamic_resources:
                    for device in claim.claim_resources:
                        message = (
                            f"claim {claim.claim_namespace}/{claim.claim_name}, driver {device.driver_name}"
                        )
                        for name in device.cdi_devices:
                            claims.update((f.lower(), message) for f in self._functions(name.name))
        return claims
