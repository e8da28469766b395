"""Facts about a pod, read from what the CRI carries: labels, annotations, the cgroup parent.

Keys and formats are Koordinator's (reference koordinator c.1). Kubernetes' own class is not on the wire; it
is read from the cgroup parent (reference c.2: ``besteffort``, else ``burstable``, else Guaranteed).
"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.model.idset import Mask
from proxy.model.workload import KubeQos, Pod, QosClass
from proxy.pools.annotations import RESOURCE_SPEC, RESOURCE_STATUS, resource_spec, resource_status

QOS_LABEL = "koordinator.sh/qosClass"
POD_KEYS = (QOS_LABEL, RESOURCE_STATUS, RESOURCE_SPEC)
"""All labels and annotations that are read here."""


def kube_qos(cgroup_parent: str) -> KubeQos:
    """Read Kubernetes' QoS class from a cgroup parent, cgroupfs path or systemd slice."""
    if "besteffort" in cgroup_parent:
        return KubeQos.BEST_EFFORT
    if "burstable" in cgroup_parent:
        return KubeQos.BURSTABLE
    return KubeQos.GUARANTEED


def qos_class(text: str) -> QosClass:
    """Read the QoS label; anything that is not a class counts as none, as in Koordinator."""
    try:
        return QosClass(text)
    except ValueError:
        return QosClass.NONE


def pod_facts(
    sandbox_id: str,
    uid: str,
    namespace: str,
    name: str,
    attempt: int,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    cgroup_parent: str,
) -> Pod:
    """Gather what matters about a pod.

    Args:
        sandbox_id: The runtime's id of the sandbox; empty while it is being made.
        uid: As in PodSandboxMetadata.
        namespace: The same.
        name: The same.
        attempt: The same.
        labels: The sandbox's.
        annotations: The sandbox's.
        cgroup_parent: ``linux.cgroup_parent``; empty where it is not known.
    """
    status, problem = resource_status(annotations)
    spec, fault = resource_spec(annotations)
    qos = qos_class(labels.get(QOS_LABEL, ""))
    return Pod(
        sandbox_id,
        uid,
        namespace,
        name,
        attempt,
        qos,
        kube_qos(cgroup_parent),
        cgroup_parent,
        status.cpus or None,
        problem or fault,
        Mask(status.nodes) if status.nodes else None,
        spec.required,
        spec.preferred,
        spec.exclusive,
    )


def parent_of(cgroups_path: str) -> str:
    """Give the cgroup parent of an OCI ``linux.cgroupsPath`` (``/a/b/ID`` or ``slice:prefix:ID``)."""
    if ":" in cgroups_path and "/" not in cgroups_path:
        return cgroups_path.partition(":")[0]
    return cgroups_path.rpartition("/")[0]
