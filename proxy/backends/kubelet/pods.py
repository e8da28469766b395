"""Find a pod in kubelet's list of pods.

Kubelet knows a pod before it calls the runtime for it. So a list that was requested after a call arrived
contains the call's pod, if kubelet knows the pod at all. One request at a time is made, and its answer serves
all waiting callers:

- If the pod is in a list that is younger than 5 s, the caller gets it from this list.
- If it is not, and the caller came after that list was requested, the list is requested again, for the same
  pod at most once a second.
- If it is not, and the caller came before that list was requested, kubelet does not know the pod.

After a failed request no new request is made for ten times as long as the failed one took (30 s at most): so
a kubelet that never answers costs about a tenth of the time, and a kubelet that refuses at once costs
nothing. A single timeout is an exception: only callers that came before its end get no answer, so that a
kubelet that is slow once does not hide the next pods.

Static pods are identified by the hash of their file. It is their uid in the CRI, but the list may have the
uid of the mirror pod, which has the hash as an annotation. Every user may write annotations, so namespace and
name must match too.

``json.loads`` lets no other thread run until it has finished. For a list of hundreds of pods this takes tens
of milliseconds, in which the proxy forwards no call. So only the outermost object and its list ``items`` are
walked in Python here, and each item is decoded separately: other threads run in between, and the unused parts
of an item are freed before the next item is decoded.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from proxy.backends.kubelet.settings import KubeletError
from proxy.model.grpc_status import GrpcStatus
from proxy.pools.pod_spec import CONFIG_HASH, PodSpec, pod_spec

FRESH_S = 5.0
SAME_POD_PAUSE_S = 1.0
PAUSE_FACTOR = 10
LONGEST_PAUSE_S = 30.0

_NEVER = float("-inf")
_CONTAINERS = ("containers", "initContainers")
_SPEC_FIELDS = (*_CONTAINERS, "resources", "overhead")
_CONTAINER_FIELDS = ("name", "restartPolicy", "resources")
Item = Mapping[str, Any]
PodIndex = dict[tuple[str, ...], Item]

_SPACE = re.compile(r"[ \t\n\r]*")


def read_items(content: bytes) -> Iterator[object]:
    """Yield the items of a PodList as Kubernetes writes it; the content may leave out its kind.

    Args:
        content: JSON in UTF-8.

    Raises:
        ValueError: The content is not JSON, or not a PodList; items before the error have been yielded.
        RecursionError: The content is nested too deeply.
    """
    text = _JsonCursor(content.decode())
    for key in text.fields():
        if key == "items" and text.skip("["):
            yield from text.rest_of_list()
            continue
        value = text.value()
        if (key == "kind" and value != "PodList") or (key == "items" and value is not None):
            raise ValueError("it is not a PodList")
    if text.peek():
        raise ValueError(f"there is more text after its end, at character {text.at}")


class _JsonCursor:
    """JSON text, and the position up to which it has been read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._decode = json.JSONDecoder().raw_decode
        self.at = 0

    def peek(self) -> str:
        """Return the next character after blanks; empty at the end."""
        blanks = _SPACE.match(self._text, self.at)
        self.at = blanks.end() if blanks else self.at
        return self._text[self.at : self.at + 1]

    def skip(self, mark: str) -> bool:
        """Step over a mark if it comes next; return whether it did."""
        is_next = self.peek() == mark
        self.at += is_next
        return is_next

    def require(self, mark: str) -> None:
        if not self.skip(mark):
            raise ValueError(f"{mark!r} is missing at character {self.at}")

    def value(self) -> object:
        self.peek()
        value: object
        value, self.at = self._decode(self._text, self.at)
        return value

    def fields(self) -> Iterator[str]:
        """Yield the keys of an object; the caller reads the value of each key before the next key."""
        self.require("{")
        ended = self.skip("}")
        while not ended:
            key = self.value()
            if not isinstance(key, str):
                raise ValueError(f"a key is missing before character {self.at}")  # noqa: TRY004 - as above
            self.require(":")
            yield key
            ended = self.skip("}")
            if not ended:
                self.require(",")

    def rest_of_list(self) -> Iterator[object]:
        """Yield the items of a list whose opening bracket has been read."""
        ended = self.skip("]")
        while not ended:
            yield self.value()
            ended = self.skip("]")
            if not ended:
                self.require(",")


class PodList:
    """Kubelet's list of pods, read when it is needed; safe to use from several threads."""

    def __init__(self, fetch: Callable[[], bytes], clock: Callable[[], float] = time.monotonic) -> None:
        """Store the function that reads the list.

        Args:
            fetch: Returns the list as JSON within a deadline; raises KubeletError.
            clock: A monotonic clock, in seconds.
        """
        self._fetch = fetch
        self._clock = clock
        self._lock = threading.Lock()
        self._items: PodIndex = {}
        self._started = _NEVER
        self._retry_not_before = _NEVER
        self._failure = ""
        self._hung = False
        self._requested_at: dict[str, float] = {}

    def find(self, uid: str, namespace: str, name: str) -> PodSpec | None:
        """Find a pod.

        Args:
            uid: As in PodSandboxMetadata.
            namespace: As in PodSandboxMetadata.
            name: As in PodSandboxMetadata.

        Returns:
            The pod, or None if kubelet does not know it.

        Raises:
            KubeletError: The list cannot be read.
            InputError: The list contains the pod, but it is malformed.
        """
        came = self._clock()
        with self._lock:
            now = self._clock()
            item = find_pod(self._items, uid, namespace, name) if now - self._started < FRESH_S else None
            rests = (
                came < self._retry_not_before or now - self._requested_at.get(uid, _NEVER) < SAME_POD_PAUSE_S
            )
            if item is None and self._started < came and not rests:
                self._renew(uid, now)
            if self._failure:
                raise KubeletError(self._failure)  # no code: this class decides when to request again
            item = item or find_pod(self._items, uid, namespace, name)
        return None if item is None else pod_spec(item, f"{namespace}/{name}", listed=True)

    def _renew(self, uid: str, now: float) -> None:
        self._requested_at = {u: at for u, at in self._requested_at.items() if now - at < SAME_POD_PAUSE_S}
        self._requested_at[uid] = self._started = now
        self._items, self._failure = {}, ""
        try:
            self._items = _read_index(self._fetch())
        except KubeletError as error:
            self._failure = str(error)
            hung_before, self._hung = self._hung, error.code == GrpcStatus.DEADLINE_EXCEEDED
            ended = self._clock()
            tolerated = self._hung and not hung_before
            pause = 0.0 if tolerated else min(PAUSE_FACTOR * (ended - now), LONGEST_PAUSE_S)
            self._retry_not_before = ended + pause
        else:
            self._hung = False


def _read_index(content: bytes) -> PodIndex:
    """Read a list of pods."""
    try:
        return index_pods(read_items(content))
    except (ValueError, RecursionError) as error:
        raise KubeletError(f"cannot read kubelet's list of pods: {error}") from None


def index_pods(items: Iterable[object]) -> PodIndex:
    """Index pods by uid, and by hash, namespace and name; fields that are not used here are dropped."""
    index: PodIndex = {}
    for item in items:
        _add_pod(item, index)
    return index


def find_pod(index: PodIndex, uid: str, namespace: str, name: str) -> Item | None:
    """Find the pod of a CRI sandbox; None if kubelet does not list it."""
    return index.get((uid,)) or index.get((uid, namespace, name))


def _add_pod(item: object, index: PodIndex) -> None:
    """Index an item by its uid and its hash, if it has them."""
    metadata = item.get("metadata") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(metadata, dict):
        return
    uid, annotations = metadata.get("uid"), metadata.get("annotations")
    hashed = annotations.get(CONFIG_HASH) if isinstance(annotations, dict) else None
    used = _used_fields(item)
    if isinstance(uid, str):
        index[(uid,)] = used
    if isinstance(hashed, str):
        index[(hashed, str(metadata.get("namespace")), str(metadata.get("name")))] = used


def _used_fields(item: Item) -> Item:
    """Drop the fields that are not used here, which are nine tenths of a list."""
    metadata = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    spec, status = item.get("spec"), item.get("status")
    if isinstance(spec, dict):
        spec = _only(spec, _SPEC_FIELDS)
        for key in _CONTAINERS:
            if isinstance(spec.get(key), list):
                spec[key] = [_only(c, _CONTAINER_FIELDS) if isinstance(c, dict) else c for c in spec[key]]
    if isinstance(status, dict):
        status = _only(status, ("qosClass",))
    return {**item, "metadata": metadata, "spec": spec, "status": status}


def _only(raw: Item, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: raw[key] for key in keys if key in raw}
