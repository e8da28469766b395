"""A call that waits at a front end for its decision, and the data kept until it is over.

A front end decodes its protocol into an ``UndecidedCall``. Its reading methods return values of ``model``
from the current message, which hooks may have changed. One of ``release``, ``place`` and ``refuse`` ends
the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from proxy.engine.call_answers import CallAnswer, Forward, Refuse
from proxy.engine.call_events import UpdateRequested
from proxy.executor.ports import DeviceFacts
from proxy.model.devices import AllocateAnswer, DeviceField
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Bounds
from proxy.model.workload import Pod, Request

if TYPE_CHECKING:
    from proxy.engine.inflight import InflightCall
    from proxy.executor.quotas import QuotaUpdate

NO_DEVICES = DeviceFacts()
"""Used instead of devices that were not read, because they could change nothing."""


class CreateRequest(Protocol):
    """The request of a CreateContainer. The methods read parts that few calls need.

    Attributes:
        sandbox_id: The runtime's id of the pod's sandbox.
        name, attempt: The container's name and attempt.
        resources: The resources that it requests.
    """

    sandbox_id: str
    name: str
    attempt: int
    resources: Request

    def pod(self, bounds: Bounds) -> Pod:
        """Read the pod; ``bounds`` are the CPUs and NUMA nodes that its annotations may name."""

    def pod_total(self) -> Request | None:
        """Read the sum of the requests of the pod's containers; None if the request does not contain it."""

    def devices(self) -> DeviceFacts:
        """Read which devices the container gets."""


class UndecidedCall(Protocol):
    """One call while it is decided.

    Attributes:
        decode_errors: The exceptions that its methods raise if the message cannot be decoded.
        method: The CRI method of the call.
        body: The current message, in a form that only the front end reads.
        context: For the code that decides; the front end does not use it.
        decided: The call was forwarded or refused.
        done: The call is over.
    """

    decode_errors: ClassVar[tuple[type[Exception], ...]]
    method: str
    body: Any
    context: object
    decided: bool
    done: bool

    def target(self) -> str:
        """Read the id of the container or sandbox that the call is about."""

    def sandbox(self, bounds: Bounds) -> Pod:
        """Read the pod of a RunPodSandbox."""

    def sandbox_total(self) -> Request:
        """Read the sum of the requests of a RunPodSandbox's containers."""

    def create_request(self) -> CreateRequest:
        """Read a CreateContainer."""

    def resource_update(self) -> UpdateRequested:
        """Read an UpdateContainerResources."""

    def pod_of(self, known: Mapping[str, Pod], bounds: Bounds) -> Pod | None:
        """Read the pod of a RunPodSandbox or a CreateContainer, and decode only the necessary parts.

        Args:
            known: Sandbox id to pod.
            bounds: CPUs and NUMA nodes that annotations may name.

        Returns:
            The pod; None if the message alone does not identify it.
        """

    def hook_view(self) -> Any:
        """Return the message as hooks see it: ``proxy.frontends.hook_bridge.view.HookView``."""

    def replace_body(self, body: Any) -> None:
        """Replace the message."""

    def set_cgroup_parent(self, parent: str) -> None:
        """Replace the cgroup of the pod in the message; for a CreateContainer."""

    def add_devices(self, answers: Mapping[str, AllocateAnswer]) -> Mapping[str, DeviceField]:
        """Add the answers of device plugins to a CreateContainer, by resource.

        Returns:
            The fields that they have set, by name.

        Raises:
            DeviceConflictError: The answers contradict the request or each other, or cannot be added.
        """

    def release(self) -> None:
        """Let the call continue with its message; do nothing if it is decided already."""

    def place(self, cpus: CpuSet | None, mems: Mask | None, quota: int = 0) -> None:
        """Let a CreateContainer or an UpdateContainerResources continue with a decision.

        Args:
            cpus: The CPUs; None to erase those that the message names.
            mems: The memory nodes; None to leave them.
            quota: The CFS quota, -1 for none; 0 to leave it.
        """

    def refuse(self, code: int, message: str) -> None:
        """Answer the call with a gRPC status."""


@dataclass(slots=True)
class CallContext:
    """The data kept of a call until its answer has passed.

    Attributes:
        target: Container id or sandbox id that the call is about; a create's token.
        pod: The pod, for RunPodSandbox.
        token: The token under which the pod's admission is recorded, if it was decided as a whole.
        sent_cpus: The CPUs in the create that was sent to the runtime.
        inflight_call: Set while the call may write the container's cpuset.
        requested: The request of an update.
        quota_update: The part of an update that requests another CFS quota; None for none.
        is_named: Set once the runtime has named the created container or sandbox.
        body: A create's message before hooks have changed it; None if no hook was called.
        device_fields: Fields of a create's message that device plugins have set, by name.
    """

    target: str = ""
    pod: Pod | None = None
    token: str = ""
    sent_cpus: CpuSet | None = None
    inflight_call: InflightCall | None = None
    requested: UpdateRequested | None = None
    quota_update: QuotaUpdate | None = None
    is_named: bool = False
    body: Any = None
    device_fields: Mapping[str, DeviceField] | None = None


def send(call: UndecidedCall, answer: CallAnswer) -> None:
    """End the wait of a call as the engine has decided."""
    if type(answer) is Forward:
        call.place(answer.cpus, answer.mems, answer.quota)
    elif type(answer) is Refuse:
        call.refuse(answer.code, answer.message)
    else:
        call.release()


SpawnForCall = Callable[[UndecidedCall, Coroutine[object, object, None]], None]
"""Runs a coroutine that decides a call; the call waits for it."""
CallHandler = Callable[[UndecidedCall], None]
CallEndHandler = Callable[[UndecidedCall, CallContext, int | None], None]
