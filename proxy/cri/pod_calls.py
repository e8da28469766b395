"""What calls about pod sandboxes mean. They are only read, and pass as they came."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from proxy.cri.pb import api_pb2 as pb
from proxy.cri.trips import NOT_FOUND, OK, Call, Finished, Request, Trip
from proxy.cri.views import pod_of
from proxy.keeper.keeper import Keeper


class PodCalls:
    """RunPodSandbox, StopPodSandbox, RemovePodSandbox."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.requests: Mapping[str, Request] = {
            "RunPodSandbox": self._run_pod,
            "StopPodSandbox": self._pod_ref,
            "RemovePodSandbox": self._pod_ref,
        }
        self.finished: Mapping[str, Finished] = {
            "RunPodSandbox": self._run_pod_done,
            "StopPodSandbox": self._pod_stopped,
            "RemovePodSandbox": self._pod_removed,
        }

    def _run_pod(self, call: Call) -> None:
        config = pb.RunPodSandboxRequest.FromString(call.body).config
        call.state = Trip(pod=pod_of(config))
        call.release()

    def answered(self, trip: Trip, message: bytes) -> None:
        """The runtime has named the sandbox."""
        trip.target = pb.RunPodSandboxResponse.FromString(message).pod_sandbox_id

    def _run_pod_done(self, trip: Trip, status: int | None) -> None:
        if status == OK and trip.target and trip.pod is not None:
            self.keeper.pod_running(dataclasses.replace(trip.pod, sandbox_id=trip.target))

    def _pod_ref(self, call: Call) -> None:
        call.state = Trip(target=pb.StopPodSandboxRequest.FromString(call.body).pod_sandbox_id)
        call.release()

    def _pod_stopped(self, trip: Trip, status: int | None) -> None:
        if status in (OK, NOT_FOUND):
            self.keeper.pod_stopped(trip.target)

    def _pod_removed(self, trip: Trip, status: int | None) -> None:
        if status in (OK, NOT_FOUND):
            self.keeper.pod_removed(trip.target)
