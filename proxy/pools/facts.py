"""Facts about a pod, read from what the CRI carries: labels, annotations, the cgroup parent.

Keys and formats are Koordinator's (Koordinator v1.8.0 apis/extension/qos.go). Kubernetes' own class is not on
the wire; it is read from the cgroup parent: what comes after ``kubepods``, as kubelet names its groups
(``pkg/kubelet/cm/qos_container_manager_linux.go``). Koordinator looks for the words anywhere in the path;
here that rule applies only if the path has no ``kubepods``, because a cgroup root or a uid may hold the words
too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import structs

from proxy.model.defects import DefectKind, InputDefect
from proxy.model.machine import ANY_MACHINE, Bounds
from proxy.model.pod_selection import selectable_labels
from proxy.model.quoting import NAME, printable, quoted, storable_name
from proxy.model.workload import KubeQos, Pod, QosClass
from proxy.pools.annotations import ANNOTATION_KEYS, annotation_fields

QOS_LABEL = "koordinator.sh/qosClass"
POD_KEYS = (QOS_LABEL, *ANNOTATION_KEYS)
"""All labels and annotations of a pod that are read here."""


LONGEST_PATH = 4096
"""Bytes of a cgroup parent; Linux takes no longer path."""
_KUBEPODS = re.compile(
    r"(?:.*?[/-])??kubepods(?:\.slice/(?:[^/]*?-)?kubepods)?(?=[/.-]|$)"
    r"(?:[/-](?P<qos>besteffort|burstable)(?=[/.-]|$))?",
    re.DOTALL,
)
"""A cgroup parent up to the group of a QoS class, by either cgroup driver, with or without a cgroup root."""
_POD_GROUP = re.compile(
    r"(?:(?:.*/)?kubepods(?:/(?P<qos>besteffort|burstable))?/pod[^/]*"
    r"|(?:[^/]*-)?kubepods(?:-(?P<qos_of_slice>besteffort|burstable))?-pod[^/-]*\.slice)\Z",
    re.DOTALL,
)
"""The group of a pod, a path of cgroupfs or a slice; the cgroup root before it may have the same words."""


def kube_qos(cgroup_parent: str) -> KubeQos:
    """Read Kubernetes' QoS class from a cgroup parent, cgroupfs path or systemd slice."""
    path = cgroup_parent[:LONGEST_PATH]
    if group := _POD_GROUP.match(path):
        return _CLASSES[group["qos"] or group["qos_of_slice"]]
    if group := _KUBEPODS.match(path):
        return _CLASSES[group["qos"]]
    if "besteffort" in cgroup_parent:
        return KubeQos.BEST_EFFORT
    if "burstable" in cgroup_parent:
        return KubeQos.BURSTABLE
    return KubeQos.GUARANTEED


_CLASSES = {"besteffort": KubeQos.BEST_EFFORT, "burstable": KubeQos.BURSTABLE, None: KubeQos.GUARANTEED}


def qos_class(text: str) -> QosClass:
    """Read the QoS label; a value that is not a class counts as no class, as in Koordinator."""
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
    bounds: Bounds = ANY_MACHINE,
) -> Pod:
    """Read the facts of a pod that matter for its placement.

    Args:
        sandbox_id: The runtime's id of the sandbox; empty while it is being made.
        uid: As in PodSandboxMetadata.
        namespace: As in PodSandboxMetadata.
        name: As in PodSandboxMetadata.
        attempt: As in PodSandboxMetadata.
        labels: The sandbox's.
        annotations: The sandbox's.
        cgroup_parent: ``linux.cgroup_parent``; empty if unknown.
        bounds: CPUs and NUMA nodes that annotations may name.
    """
    if len(uid) + len(namespace) + len(name) > NAME or not (uid + namespace + name).isascii():
        uid, namespace, name = storable_name(uid), storable_name(namespace), storable_name(name)
    if len(cgroup_parent) > LONGEST_PATH or not cgroup_parent.isascii():
        cgroup_parent = _path(cgroup_parent)
    label = labels.get(QOS_LABEL, "")
    qos = qos_class(label)
    has_no_keys = not annotations or annotations.keys().isdisjoint(POD_KEYS)
    kube, kept_labels = kube_qos(cgroup_parent), selectable_labels(labels)
    pod = Pod(sandbox_id, uid, namespace, name, attempt, qos, kube, cgroup_parent, labels=kept_labels)
    if has_no_keys and (qos or not label):  # most pods
        return pod
    fields, defects = annotation_fields(annotations, bounds)
    if label and not qos:
        defects.insert(0, _unknown_class(label))
    return structs.replace(pod, defects=tuple(defects), **fields)


def _path(cgroup_parent: str) -> str:
    """Return the cgroup parent if it can be a path, otherwise an empty text."""
    try:
        size = len(cgroup_parent.encode())
    except UnicodeEncodeError:
        return ""
    return cgroup_parent if size <= LONGEST_PATH else ""


def _unknown_class(label: str) -> InputDefect:
    classes = ", ".join(qos for qos in QosClass if qos)
    return InputDefect(
        printable(f"label {QOS_LABEL}: {quoted(label)} is not a class ({classes}), so the pod has none"),
        DefectKind.QOS_CLASS,
    )


def parent_of(cgroups_path: str) -> str:
    """Return the cgroup parent of an OCI ``linux.cgroupsPath`` (``/a/b/ID`` or ``slice:prefix:ID``)."""
    if ":" in cgroups_path and "/" not in cgroups_path:
        return cgroups_path.partition(":")[0]
    return cgroups_path.rpartition("/")[0]
