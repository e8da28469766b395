"""What is done with each intercepted call: messages to values, values to the keeper, answers to calls.

Calls that need no waiting are decided and sent on before the loop turns: a container that goes to a pool
costs a decode, a lookup and an append. The others become tasks, and their streams are held meanwhile.

Whatever goes wrong in here must not make the node worse than no proxy: an internal error lets the call pass
as it came and has the container looked at soon, unless its pod would rather not run (LSE, LSR).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf.message import DecodeError

from proxy.cri.pb import api_pb2 as pb
from proxy.cri.rewrite import create_suffix, update_suffix
from proxy.cri.views import pod_of, request_of
from proxy.keeper.flights import Flight
from proxy.keeper.keeper import Keeper
from proxy.keeper.launch import Launch
from proxy.keeper.sync import Sync
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.workload import Container, Phase, Pod, Pool
from proxy.plan.place import Plan
from proxy.pools.claims import STRICT

NOT_FOUND, FAILED_PRECONDITION, INTERNAL, UNAVAILABLE = 5, 9, 13, 14
OK = 0


class Call(Protocol):
    """One held call; see ``proxy.cri.wire``."""

    method: str
    body: bytes
    state: object
    done: bool

    def release(self, body: bytes | None = None) -> None:
        """Let the call go on, with another body where one is given."""

    def refuse(self, code: int, message: str) -> None:
        """Answer the call with a gRPC status."""


@dataclass(slots=True)
class Trip:
    """What we remember of a call until its answer has passed.

    Attributes:
        target: Container id or sandbox id that the call is about; a create's token.
        pod: The pod, for RunPodSandbox.
        flight: Set while the call may write the container's cpuset.
        named: Set once the runtime has named what was created.
    """

    target: str = ""
    pod: Pod | None = None
    flight: Flight | None = None
    named: bool = False


@dataclass(slots=True)
class Interceptors:
    """The handler of all intercepted calls."""

    keeper: Keeper
    sync: Sync
    launch: Launch
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    # -- the wire calls these -----------------------------------------------------------------------------

    def request(self, call: Call) -> None:
        """A call is held: decide, and send it on now or later."""
        if self.keeper.synced.is_set():
            self._handle(call)
        else:
            self._spawn(call, self._when_synced(call))

    def response(self, call: Call, message: bytes) -> None:
        """The answer's message passes on its way up."""
        trip = call.state
        if not isinstance(trip, Trip):
            return
        if call.method == "CreateContainer":
            container_id = pb.CreateContainerResponse.FromString(message).container_id
            if container_id:
                trip.named = True
                self.keeper.created(trip.target, container_id)
        elif call.method == "RunPodSandbox" and trip.pod is not None:
            trip.target = pb.RunPodSandboxResponse.FromString(message).pod_sandbox_id

    def finished(self, call: Call, status: int | None) -> None:
        """The call is over: a gRPC status, or None where no answer will come."""
        trip = call.state
        call.state = None
        if isinstance(trip, Trip):
            _FINISHED[call.method](self, trip, status)

    # -- holding ------------------------------------------------------------------------------------------

    def _handle(self, call: Call) -> None:
        try:
            _REQUEST[call.method](self, call)
        except DecodeError as error:
            # The runtime would refuse it in its own words; it shall.
            self.keeper.problems.note(f"cannot read a {call.method} request: {error}")
            call.release()
        except Exception as error:  # noqa: BLE001  the node must not suffer from a fault of ours
            self._fault(call, error)

    def _fault(self, call: Call, error: BaseException) -> None:
        self.keeper.broken(error)
        self.keeper.attention.set()
        options = self.keeper.options
        must_refuse = options.enforce and (options.refuse_on_error or _is_strict(call))
        if call.method == "CreateContainer" and must_refuse:
            message = f"cannot place the container: internal error: {type(error).__name__}: {error}"
            call.refuse(INTERNAL, message)
        else:
            call.release()

    def _spawn(self, call: Call, work: Coroutine[object, object, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001  as in _handle
                self._fault(call, error)

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _when_synced(self, call: Call) -> None:
        try:
            async with asyncio.timeout(self.keeper.options.call_timeout):
                await self.keeper.synced.wait()
        except TimeoutError:
            self.keeper.problems.note(f"{call.method} passed undecided: not in step with the runtime yet")
            self.keeper.attention.set()
            if call.method == "CreateContainer" and self.keeper.options.enforce and _is_strict(call):
                call.refuse(UNAVAILABLE, "cannot place the container: not in step with the runtime yet")
                return
            call.release()
            return
        if not call.done:
            self._handle(call)

    # -- pods ---------------------------------------------------------------------------------------------

    def _run_pod(self, call: Call) -> None:
        config = pb.RunPodSandboxRequest.FromString(call.body).config
        call.state = Trip(pod=pod_of(config))
        call.release()

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

    # -- creating -----------------------------------------------------------------------------------------

    def _create(self, call: Call) -> None:
        message = pb.CreateContainerFacts.FromString(call.body)
        config = message.config
        pod = self.keeper.state.pods.get(message.pod_sandbox_id)
        if pod is None or not pod.cgroup_parent:
            pod = pod_of(pb.PodSandboxConfig.FromString(message.sandbox_config), message.pod_sandbox_id)
            if pod.uid:
                self.keeper.state = self.keeper.state.with_pod(pod)
                self.keeper.journal.put(f"p/{pod.sandbox_id}", pod)
        meta = config.metadata
        plan = self.keeper.place(pod, meta.name, meta.attempt, request_of(config.linux.resources))
        if plan.container is None:
            if self.keeper.options.enforce:
                call.refuse(plan.verdict.code, plan.verdict.message)
            else:
                call.release()
            return
        call.state = Trip(target=plan.container.id)
        if not self.keeper.options.enforce:
            call.release()
        elif plan.container.placement.pool is Pool.OWN:
            self._spawn(call, self._create_owner(call, plan, plan.container))
        else:
            cpus = self.keeper.state.wanted(plan.container)
            call.release(call.body + create_suffix(cpus, plan.container.placement.mems))

    async def _create_owner(self, call: Call, plan: Plan, container: Container) -> None:
        obstacle = await self.keeper.clear(plan)
        if obstacle:
            self.keeper.problems.note(obstacle)
            self.keeper.failed(container.id)
            call.refuse(FAILED_PRECONDITION, f"cannot free CPUs for {container.ref}: {obstacle}")
            return
        call.release(call.body + create_suffix(container.placement.own, container.placement.mems))

    def _create_done(self, trip: Trip, status: int | None) -> None:
        if trip.named:
            return
        if status is None:
            self.keeper.uncertain(trip.target)
        else:
            self.keeper.failed(trip.target)

    # -- living -------------------------------------------------------------------------------------------

    def _start(self, call: Call) -> None:
        container_id = pb.StartContainerRequest.FromString(call.body).container_id
        container = self.keeper.state.containers.get(container_id)
        if container is not None and self.launch.is_fresh(container):
            self._go_start(call, container_id)
        else:
            self._spawn(call, self._start_later(call, container_id))

    async def _start_later(self, call: Call, container_id: str) -> None:
        if container_id in self.keeper.state.containers or await self.sync.adopt_one(container_id):
            try:
                obstacle = await self.launch.freshen(container_id)
            except (UnavailableError, RuntimeCallError) as error:
                obstacle = str(error)
            if obstacle:
                self.keeper.problems.note(obstacle)
                call.refuse(FAILED_PRECONDITION, f"cannot start container {container_id}: {obstacle}")
                return
        if not call.done:
            self._go_start(call, container_id)

    def _go_start(self, call: Call, container_id: str) -> None:
        container = self.keeper.state.containers.get(container_id)
        if container is not None and container.phase in (Phase.CREATED, Phase.STARTING):
            call.state = Trip(container_id, flight=self.launch.start(container_id))
        # Of any other the runtime will say what is wrong with that.
        call.release()

    def _start_done(self, trip: Trip, status: int | None) -> None:
        if trip.flight is None:
            return
        if status is None:
            self.launch.stray(trip.flight)
        else:
            self.launch.started(trip.flight, ok=status == OK)

    def _update(self, call: Call) -> None:
        container_id = pb.UpdateContainerResourcesRequest.FromString(call.body).container_id
        if container_id in self.keeper.state.containers:
            self._go_update(call, container_id)
        else:
            self._spawn(call, self._update_later(call, container_id))

    async def _update_later(self, call: Call, container_id: str) -> None:
        known = await self.sync.adopt_one(container_id)
        if call.done:
            return
        if known:
            self._go_update(call, container_id)
        else:
            call.release()

    def _go_update(self, call: Call, container_id: str) -> None:
        container = self.keeper.state.containers[container_id]
        if not self.keeper.options.enforce or container.phase is Phase.EXITED:
            call.release()
            return
        want = self.keeper.state.wanted(container)
        call.state = Trip(container_id, flight=self.keeper.flights.depart(container_id, want))
        call.release(call.body + update_suffix(want, container.placement.mems))

    def _update_done(self, trip: Trip, status: int | None) -> None:
        if trip.flight is None:
            return
        if status is None:
            self.launch.stray(trip.flight)
        else:
            self.launch.landed(trip.flight, trip.flight.carries if status == OK else None)

    # -- ending -------------------------------------------------------------------------------------------

    def _container_ref(self, call: Call) -> None:
        call.state = Trip(target=pb.StopContainerRequest.FromString(call.body).container_id)
        call.release()

    def _stopped(self, trip: Trip, status: int | None) -> None:
        if status in (OK, NOT_FOUND):
            self.keeper.phase(trip.target, Phase.EXITED)
        else:
            self.keeper.attention.set()

    def _removed(self, trip: Trip, status: int | None) -> None:
        if status in (OK, NOT_FOUND):
            self.keeper.removed([trip.target])
        else:
            self.keeper.attention.set()


def _is_strict(call: Call) -> bool:
    try:
        return pod_of(pb.CreateContainerRequest.FromString(call.body).sandbox_config).qos in STRICT
    except DecodeError:
        return False


_REQUEST: dict[str, Callable[[Interceptors, Call], None]] = {
    "RunPodSandbox": Interceptors._run_pod,
    "StopPodSandbox": Interceptors._pod_ref,
    "RemovePodSandbox": Interceptors._pod_ref,
    "CreateContainer": Interceptors._create,
    "StartContainer": Interceptors._start,
    "StopContainer": Interceptors._container_ref,
    "RemoveContainer": Interceptors._container_ref,
    "UpdateContainerResources": Interceptors._update,
}
_FINISHED: dict[str, Callable[[Interceptors, Trip, int | None], None]] = {
    "RunPodSandbox": Interceptors._run_pod_done,
    "StopPodSandbox": Interceptors._pod_stopped,
    "RemovePodSandbox": Interceptors._pod_removed,
    "CreateContainer": Interceptors._create_done,
    "StartContainer": Interceptors._start_done,
    "StopContainer": Interceptors._stopped,
    "RemoveContainer": Interceptors._removed,
    "UpdateContainerResources": Interceptors._update_done,
}
METHODS = frozenset(
    f"/runtime.{version}.RuntimeService/{method}" for version in ("v1", "v1alpha2") for method in _REQUEST
)
"""Full paths of the intercepted methods."""
