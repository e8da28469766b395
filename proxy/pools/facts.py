"""Facts about a pod, read from what the CRI carries: labels, annotations, the cgroup parent.

Keys and formats are Koordinator's (reference koordinator c.1). Kubernetes' own class is not on the wire; it
is read from the cgroup parent (reference c.2: ``besteffort``, else ``burstable``, else Guaranteed).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from proxy.model.idset import CpuSet
from proxy.model.workload import KubeQos, Pod, QosClass

QOS_LABEL = "koordinator.sh/qosClass"
RESOURCE_STATUS = "scheduling.koordinator.sh/resource-status"
POD_KEYS = (QOS_LABEL, RESOURCE_STATUS)
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


def resource_status(text: str) -> tuple[CpuSet | None, str]:
    """Read the resource-status annotation.

    Returns:
        The CPUs that it names (None for none), and what is wrong with it in words (empty if nothing).
    """
    if not text:
        return None, ""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        return None, f"annotation {RESOURCE_STATUS} is not JSON: {error}"
    if not isinstance(data, dict):
        return None, f"annotation {RESOURCE_STATUS} is not a JSON object"
    named = data.get("cpuset", "")
    if not isinstance(named, str):
        return None, f"annotation {RESOURCE_STATUS}: cpuset is not a text such as '0-3'"
    try:
        return CpuSet.parse(named) or None, ""
    except ValueError as error:
        return None, _short(f"annotation {RESOURCE_STATUS}: cpuset {error}")


def _short(text: str, limit: int = 300) -> str:
    """Cut words that quote a user's input: an annotation may be as long as a book."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


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
    cpuset, problem = resource_status(annotations.get(RESOURCE_STATUS, ""))
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
        cpuset,
        problem,
    )


def parent_of(cgroups_path: str) -> str:
    """Give the cgroup parent of an OCI ``linux.cgroupsPath`` (``/a/b/ID`` or ``slice:prefix:ID``)."""
    if ":" in cgroups_path and "/" not in cgroups_path:
        return cgroups_path.partition(":")[0]
    return cgroups_path.rpartition("/")[0]
