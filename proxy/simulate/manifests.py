"""Read pods from users' manifests: Pods, lists of them, and the templates of workloads.

Pods of a live cluster are taken as they are: a pod that has ended holds nothing and is left out, and a pod
that was bound to a machine (``nodeName``) requests that machine. A workload counts as the pods that its
controller would create. Affinities, taints and disruption budgets are not simulated; a note reports that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Never

from proxy.model.errors import InputError
from proxy.model.phrases import counted
from proxy.observe.json_access import as_list, as_map
from proxy.pools.pod_spec import pod_spec
from proxy.simulate.documents import Document, documents, found_files, name_of, read_bytes, shape_of
from proxy.simulate.pods import PodTemplate, SimulatedPod, pod_template_of

MOST_PODS = 1_000_000
_LISTS = ("List", "PodList")
_JOB = "Job"
_COUNTS = {
    "Deployment": "replicas",
    "ReplicaSet": "replicas",
    "StatefulSet": "replicas",
    "ReplicationController": "replicas",
    _JOB: "parallelism",
}
_DAEMONS = "DaemonSet"
_KNOWN = ", ".join(("Pod", "List", *_COUNTS, _DAEMONS))
_OF_CLUSTERS = ("Fleet", "Node", "Numatopology", "NodeResourceTopology")
_ENDED = ("Succeeded", "Failed")
_HOSTNAME = "kubernetes.io/hostname"
_NOT_SIMULATED = ("affinity", "topologySpreadConstraints")


@dataclass(slots=True)
class Pods:
    """The pods of manifests.

    Attributes:
        simulated_pods: The pods, in the order of files and documents.
        notes: Sentences about pods and features that were left out.
    """

    simulated_pods: list[SimulatedPod] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def load_pods(
    paths: Sequence[str], machines: Sequence[str], replicas: int = 1, *, bound: bool = True
) -> Pods:
    """Read pods.

    Args:
        paths: Files, directories, or ``-`` for standard input.
        machines: Names of all machines; a DaemonSet has a pod on each.
        replicas: How many times each pod comes (a DaemonSet's come once).
        bound: Whether ``nodeName`` and a node selector for a host name are followed.

    Raises:
        InputError: A file, a document or a pod is invalid; one line, with file and line.
    """
    pods = pods_of(read_documents(paths), machines, replicas, bound=bound)
    if not pods.simulated_pods:
        raise InputError(f"cannot simulate pods: no pods found in {', '.join(map(name_of, paths))}")
    return pods


def read_documents(paths: Sequence[str]) -> list[Document]:
    """Read the documents of all files.

    Args:
        paths: Files, directories, or ``-`` for standard input.

    Raises:
        InputError: A file does not exist, is neither YAML nor JSON, or has a document that is not an object.
    """
    all_documents = [
        document for path in found_files(paths) for document in documents(read_bytes(path), name_of(path))
    ]
    for document in all_documents:
        if not isinstance(document.value, dict):
            shape = shape_of(document.value)
            raise InputError(f"cannot read {document.at()}: the document is {shape}, not an object")
    return all_documents


def pods_of(
    found: Iterable[Document],
    machines: Sequence[str],
    replicas: int = 1,
    *,
    bound: bool = True,
    others: Sequence[str] = (),
) -> Pods:
    """Return the pods of documents; there may be none. The arguments are those of ``load_pods``.

    Kinds of ``others`` are left out; any other kind that makes no pods is an error.
    """
    found = list(found)
    suspended = frozenset(_suspended_jobs(found))
    reader = _ManifestReader(machines, replicas, others, suspended, bound=bound)
    for document in found:
        reader.take(document, document.value)
    reader.report_skipped()
    return reader.pods


def _suspended_jobs(found: Sequence[Document]) -> Iterator[tuple[str, str]]:
    """Yield the namespace and the name of each Job that is suspended: its controller deletes its pods."""
    for document in found:
        items = as_list(as_map(document.value).get("items"))
        for raw in map(as_map, (document.value, *items)):
            if raw.get("kind") == _JOB and as_map(raw.get("spec")).get("suspend") is True:
                metadata = as_map(raw.get("metadata"))
                yield _namespace(metadata), str(metadata.get("name"))


def _namespace(metadata: Mapping[str, object]) -> str:
    return str(metadata.get("namespace") or "default")


class _ManifestReader:
    """Converts documents to pods."""

    def __init__(
        self,
        machines: Sequence[str],
        replicas: int,
        others: Sequence[str],
        suspended_jobs: frozenset[tuple[str, str]],
        *,
        bound: bool,
    ) -> None:
        self.pods = Pods()
        self._suspended_jobs = suspended_jobs
        self._others = frozenset(others)
        self._machines = machines
        self._replicas = replicas
        self._bound = bound
        self._seen: dict[str, str] = {}
        self._ended = self._suspended = 0
        self._not_simulated: dict[str, int] = {}

    def report_skipped(self) -> None:
        """Add notes about pods and features that were left out."""
        if self._ended:
            self.pods.notes.append(f"left out: {counted(self._ended, 'pod')} that ended already")
        if self._suspended:
            self.pods.notes.append(f"left out: the pods of {counted(self._suspended, 'suspended Job')}")
        for feature, count in sorted(self._not_simulated.items()):
            self.pods.notes.append(f"not followed: {feature} of {counted(count, 'pod')}")

    def take(self, document: Document, raw: object, at: str = "") -> None:
        """Add a document, or an item of a list."""
        where = document.where(raw) + at
        place = document.at(raw) + (f",{at}" if at else "")
        if not isinstance(raw, dict):
            raise InputError(f"cannot read {place}: it is {shape_of(raw)}, not an object")
        kind = raw.get("kind")
        if isinstance(kind, str) and kind in self._others:
            return
        if kind in _LISTS:
            items = raw.get("items")
            if not isinstance(items, list):
                raise InputError(f"cannot read the list in {where}: items must be a list")
            if at:
                raise InputError(f"cannot read the list in {where}: it is an item of another list")
            for number, item in enumerate(items):
                listed = {"apiVersion": "v1", "kind": "Pod", **item} if kind == "PodList" and item else item
                self._item(document, item, listed, number)
        elif kind == "Pod":
            self._pod(raw, where)
        elif isinstance(kind, str) and (kind in _COUNTS or kind == _DAEMONS):
            self._workload(raw, kind, where)
        else:
            problem = "it has no kind" if kind is None else f"kind {str(kind)[:60]!r} is not supported"
            hint = "; --cluster reads fleets and nodes" if kind in _OF_CLUSTERS and not self._others else ""
            raise InputError(f"cannot read {place}: {problem} (supported: {_KNOWN}){hint}")

    def _item(self, document: Document, item: object, listed: object, number: int) -> None:
        at = "" if isinstance(item, dict) and id(item) in document.lines else f" item {number + 1}"
        if item is listed:
            self.take(document, item, at)
        elif isinstance(listed, dict):
            self._pod(listed, document.where(item) + at)

    def _pod(self, raw: dict[str, object], where: str) -> None:
        status = raw.get("status")
        if isinstance(status, dict) and status.get("phase") in _ENDED:
            self._ended += 1
            return
        metadata = raw.get("metadata")
        if self._is_suspended(as_map(metadata)):
            return
        name = metadata.get("name") if isinstance(metadata, dict) else None
        if isinstance(metadata, dict) and name is None and isinstance(metadata.get("generateName"), str):
            name = f"{metadata['generateName']}{len(self.pods.simulated_pods) + 1}"
            raw = {**raw, "metadata": {**metadata, "name": name}}
        pod_template = self._pod_template(raw, where, is_single=self._replicas == 1)
        names = [pod_template.spec.name]
        if self._replicas > 1:
            names = [f"{pod_template.spec.name}-{number}" for number in range(1, self._replicas + 1)]
        self._add(pod_template, names)

    def _is_suspended(self, metadata: Mapping[str, object]) -> bool:
        """Return whether a pod is of a suspended Job; a note counts these Jobs."""
        owners = map(as_map, as_list(metadata.get("ownerReferences")))
        return any(
            owner.get("kind") == _JOB
            and (_namespace(metadata), str(owner.get("name"))) in self._suspended_jobs
            for owner in owners
        )

    def _workload(self, raw: Mapping[str, object], kind: str, where: str) -> None:
        metadata, spec = raw.get("metadata"), raw.get("spec")
        if not isinstance(metadata, dict) or not isinstance(spec, dict):
            self._fail(kind, where, "metadata and spec must be objects")
        template = spec.get("template")
        if not isinstance(template, dict):
            self._fail(kind, where, "spec.template must be an object")
        inner = template.get("metadata") or {}
        if not isinstance(inner, dict):
            self._fail(kind, where, "spec.template.metadata must be an object")
        names = {"name": metadata.get("name"), "namespace": metadata.get("namespace")}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**inner, **names},
            "spec": template.get("spec"),
        }
        pod_template = self._pod_template(pod, where)
        if kind == _DAEMONS:
            self._add(
                pod_template,
                [f"{pod_template.spec.name}-{node_name}" for node_name in self._machines],
                self._machines,
            )
            return
        count = self._number(spec, _COUNTS[kind], 1, kind, where)
        if kind == _JOB:
            count = self._pods_of_job(spec, count, where)
        first = 0 if kind == "StatefulSet" else 1
        total = count * self._replicas
        self._check_count(total, where)
        self._add(
            pod_template, [f"{pod_template.spec.name}-{number}" for number in range(first, first + total)]
        )

    def _pods_of_job(self, spec: Mapping[str, object], parallelism: int, where: str) -> int:
        """Return how many pods a Job has at a time, and count Jobs that are suspended."""
        count = min(parallelism, self._number(spec, "completions", parallelism, _JOB, where))
        suspend = spec.get("suspend")
        if suspend is not None and not isinstance(suspend, bool):
            self._fail(_JOB, where, "spec.suspend must be true or false")
        if suspend:
            self._suspended += 1
        return 0 if suspend else count

    def _number(self, spec: Mapping[str, object], key: str, default: int, kind: str, where: str) -> int:
        """Return a number of pods; null counts as missing, as for the API server."""
        value = spec.get(key)
        if value is None:
            return default
        if type(value) is not int or value < 0:
            self._fail(kind, where, f"spec.{key} must be a whole number that is not negative")
        return value

    def _pod_template(self, raw: Mapping[str, object], where: str, *, is_single: bool = False) -> PodTemplate:
        spec = raw.get("spec")
        node_name, names_node = "", False
        if isinstance(spec, dict):
            node_name = self._node_name_of(spec)
            names_node = self._bound and node_name != "" and node_name == spec.get("nodeName")
        node_name = node_name if self._bound else ""
        is_bound = is_single and names_node
        return pod_template_of(
            pod_spec(raw, f"in {where}"), node_name, where, is_bound=is_bound, names_node=names_node
        )

    def _node_name_of(self, spec: Mapping[str, object]) -> str:
        """Return the machine that a pod requests, and count requests that are not simulated."""
        selector = spec.get("nodeSelector")
        node_labels = dict(selector) if isinstance(selector, dict) else {}
        node_name = spec.get("nodeName") or node_labels.pop(_HOSTNAME, "")
        node_labels.pop(_HOSTNAME, "")
        for feature in [
            *(f"nodeSelector {key}" for key in node_labels),
            *(w for w in _NOT_SIMULATED if spec.get(w)),
        ]:
            self._not_simulated[feature] = self._not_simulated.get(feature, 0) + 1
        return node_name if isinstance(node_name, str) else ""

    def _add(self, pod_template: PodTemplate, names: Sequence[str], node_names: Sequence[str] = ()) -> None:
        simulated_pods = self.pods.simulated_pods
        self._check_count(len(names), pod_template.where)
        for name, node_name in _each(names, node_names):
            simulated_pod = pod_template.copy(name, len(simulated_pods) + 1, node_name)
            if simulated_pod.ref in self._seen:
                first = self._seen[simulated_pod.ref]
                raise InputError(
                    f"cannot simulate the pod {simulated_pod.ref} twice:"
                    f" {first} and {pod_template.where} have it"
                )
            self._seen[simulated_pod.ref] = pod_template.where
            simulated_pods.append(simulated_pod)

    def _check_count(self, more: int, where: str) -> None:
        if len(self.pods.simulated_pods) + more > MOST_PODS:
            raise InputError(f"cannot simulate more than {MOST_PODS} pods: {where} would exceed them")

    def _fail(self, kind: str, where: str, cause: str) -> Never:
        raise InputError(f"cannot read the {kind} in {where}: {cause}")


def _each(names: Sequence[str], node_names: Sequence[str]) -> Iterator[tuple[str, str]]:
    for at, name in enumerate(names):
        yield name, node_names[at] if node_names else ""
