"""Share kubelet's pod-resources answers: one answer serves all readers for a short time.

kubelet answers 100 requests a second, from all clients together, and the decisions about containers need some
of them. Agents that query often must not use up this limit, so each list is requested at most ten times a
second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from proxy.backends.kubelet.channel import UnixChannel
from proxy.backends.kubelet.pod_resources import PodResources
from proxy.backends.kubelet.settings import KubeletError

if TYPE_CHECKING:
    from proxy.api.kubelet import podresources_pb2 as pb

FRESH_S: Final = 0.1
"""Seconds for which an answer is used."""
CALL_S: Final = 5.0
"""Deadline of a call: no decision waits for it, and lists of large nodes take longer than one pod."""

T = TypeVar("T")


class SharedPodResources:
    """The lists of kubelet's pod-resources API; safe to use from several threads.

    The answers are shared: they must not be changed.
    """

    def __init__(self, socket: str) -> None:
        """Store the path; nothing is opened yet.

        Args:
            socket: Path of kubelet's socket.
        """
        self._channel = UnixChannel(socket, CALL_S)
        api = PodResources(self._channel, time.monotonic)
        self._pods = SharedAnswer(api.pods, time.monotonic)
        self._allocatable_resources = SharedAnswer(api.allocatable_resources, time.monotonic)

    def pods(self) -> pb.ListPodResourcesResponse:
        """Return kubelet's list of all pods.

        Raises:
            KubeletError: Kubelet does not answer.
        """
        return self._pods.get()

    def allocatable_resources(self) -> pb.AllocatableResourcesResponse:
        """Return the resources that kubelet can assign.

        Raises:
            KubeletError: Kubelet does not answer.
        """
        return self._allocatable_resources.get()

    def close(self) -> None:
        """Close the channel; calls after that fail."""
        self._channel.close()


class SharedAnswer(Generic[T]):
    """An answer that several threads use. An error is raised in all threads that have waited for it."""

    def __init__(self, query: Callable[[], T], clock: Callable[[], float]) -> None:
        """Prepare; nothing is requested yet.

        Args:
            query: Gets the answer; may raise ``KubeletError``.
            clock: A monotonic clock, in seconds.
        """
        self._query = query
        self._clock = clock
        self._lock = threading.Lock()
        self._answer: T | None = None
        self._started = float("-inf")
        self._error: KubeletError | None = None
        self._failed = float("-inf")

    def get(self) -> T:
        """Return an answer that is at most ``FRESH_S`` old.

        Raises:
            KubeletError: kubelet does not answer.
        """
        called = self._clock()
        with self._lock:
            if self._answer is not None and called < self._started + FRESH_S:
                return self._answer
            if self._error is not None and called <= self._failed:
                raise self._error
            self._started, self._answer, self._error = self._clock(), None, None
            try:
                self._answer = self._query()
            except KubeletError as error:
                self._error, self._failed = error, self._clock()
                raise
            return self._answer
