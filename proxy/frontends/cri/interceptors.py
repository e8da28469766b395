"""What is done with each intercepted call: messages to values, values to the keeper, answers to calls.

Calls that need no waiting are decided and sent on before the loop turns: a container that goes to a pool
costs a decode, a lookup and an append. The others become tasks, and their streams are held meanwhile.

Whatever goes wrong in here must not make the node worse than no proxy: an internal error lets the call pass
as it came and has the container looked at soon, unless its pod would rather not run (LSE, LSR).

A request that is not one plain gRPC message is counted and reported, and the node is compared with the
runtime soon after. No client of the CRI sends one. A create that the runtime might execute without a decision
of ours (compressed, or with trailers behind it) is refused: what it asks for cannot be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from google.protobuf.message import DecodeError

from proxy.api.cri import api_pb2 as pb
from proxy.controller.controller import Keeper
from proxy.controller.reconciler import Sync
from proxy.controller.start_update import StartUpdate
from proxy.engine.node_events import SavedCpusLearned
from proxy.frontends.cri.call import HeldCall, Trip
from proxy.frontends.cri.container_calls import ContainerCalls
from proxy.frontends.cri.create_calls import CreateCalls
from proxy.frontends.cri.decode import pod_of
from proxy.frontends.cri.hook_gateway import HookGateway
from proxy.frontends.cri.lenient_text import text
from proxy.frontends.cri.pod_calls import PodCalls
from proxy.model.grpc_status import GrpcStatus
from proxy.model.workload import Pod
from proxy.relay.events import Unusual
from proxy.telemetry import metrics

_UNREADABLE = (Unusual.COMPRESSED, Unusual.TRAILERS)
"""What a runtime may execute and is not decided on."""

UNSYNCED = "forwarded a call without a decision: the initial reconcile with the runtime is not done"


class Interceptors:
    """The handler of all intercepted calls.

    Attributes:
        awaited: What calls wait for at a start, after the first comparison; None for nothing.
    """

    def __init__(self, keeper: Keeper, sync: Sync, launch: StartUpdate) -> None:
        """Prepare to decide.

        Args:
            keeper: Whose node it is.
            sync: Looks up containers that a call names and nobody knows.
            launch: Watches over starts and updates.
        """
        self.keeper = keeper
        self.awaited: asyncio.Event | None = None
        pods, creates = PodCalls(keeper, self._hold), CreateCalls(keeper, self._hold)
        containers = ContainerCalls(keeper, sync, launch, self._hold)
        self._parts = (pods, creates, containers)
        self._requests = {**pods.requests, **creates.requests, **containers.requests}
        self._finished = {**pods.finished, **creates.finished, **containers.finished}
        self._answered = {"CreateContainer": creates.answered, "RunPodSandbox": pods.answered}
        self._tasks: set[asyncio.Task[None]] = set()

    def hook(self, hooked: HookGateway) -> None:
        """Have hooks asked from now on; calls that are under way go on as they began."""
        for part in self._parts:
            part.hooked = hooked

    def hold(self, call: HeldCall, work: Coroutine[object, object, None]) -> None:
        """Hold a call while a coroutine decides on it; a fault in there is handled as any."""
        self._hold(call, work)

    # -- the wire calls these -----------------------------------------------------------------------------

    def request(self, call: HeldCall) -> None:
        """A call is held: decide, and send it on now or later."""
        if self.keeper.store.mode.is_leaving:
            call.release()  # the node is released: this is only a relay
        elif self.awaited is None and self.keeper.synced.is_set():
            self._handle(call)
        else:
            self._hold(call, self._when_synced(call))

    def unusual(self, path: str, kind: Unusual) -> tuple[int, str] | None:
        """A request is not one plain message: report it; gives a refusal or None."""
        keeper, method = self.keeper, path.rpartition("/")[2]
        keeper.telemetry.count(metrics.CALLS_MALFORMED)
        keeper.telemetry.problem("a request is not one plain message", method=method, reason=str(kind))
        keeper.attention.set()
        if method != "CreateContainer" or kind not in _UNREADABLE:
            return None
        if keeper.store.mode.is_leaving or not keeper.store.mode.enforces:
            return None
        return GrpcStatus.UNIMPLEMENTED, f"cannot place the container: the request {kind}"

    def response(self, call: HeldCall, message: bytes) -> None:
        """The answer's message passes on its way up."""
        trip = call.state
        if not isinstance(trip, Trip):
            return
        answered = self._answered.get(call.method)
        if answered is None:
            return
        try:
            answered(trip, message)
        except Exception as error:  # noqa: BLE001  the runtime's list will say what was made
            self._unread(call, error)

    def finished(self, call: HeldCall, status: int | None) -> None:
        """The call is over: a gRPC status, or None where no answer will come."""
        trip = call.state
        call.state = None
        if not isinstance(trip, Trip):
            return
        try:
            self._finished[call.method](trip, status)
        except Exception as error:  # noqa: BLE001  as in ``response``
            self._unread(call, error)

    def _unread(self, call: HeldCall, error: Exception) -> None:
        """An answer could not be taken note of: compare the node with the runtime soon."""
        self.keeper.attention.set()
        if isinstance(error, DecodeError):
            self.keeper.telemetry.problem("cannot decode an answer", method=call.method, err=str(error))
        else:
            self.keeper.broken(error)

    # -- holding ------------------------------------------------------------------------------------------

    def _handle(self, call: HeldCall) -> None:
        try:
            self._requests[call.method](call)
        except DecodeError as error:
            self._undecodable(call, error)
        except Exception as error:  # noqa: BLE001  the node must not suffer from a fault of ours
            self._fault(call, error)

    def _undecodable(self, call: HeldCall, error: DecodeError) -> None:
        """Do with a request what can be done without knowing what it asks for.

        A runtime may read more than we do, so what it makes of the request is compared at once. Where the pod
        may be one that would rather not run than run anywhere, the runtime does not get the request.
        """
        keeper = self.keeper
        keeper.telemetry.count(metrics.REQUESTS_UNDECODABLE)
        keeper.telemetry.problem("cannot decode a request", method=call.method, err=str(error))
        keeper.attention.set()
        if call.method in MAKING and keeper.store.mode.enforces and self._is_strict(call):
            call.refuse(
                GrpcStatus.INTERNAL,
                f"cannot place what {call.method} asks for: the request cannot be decoded",
            )
        else:
            call.release()

    def _fault(self, call: HeldCall, error: BaseException) -> None:
        self.keeper.broken(error)
        self.keeper.attention.set()
        if isinstance(call.state, Trip):
            # It passes without our set: not what we meant.
            self.keeper.store.handle(SavedCpusLearned(call.state.target, None))
            call.state.sent = None
        strict = self.keeper.options.refuse_on_error or self._is_strict(call)
        must_refuse = self.keeper.store.mode.enforces and strict
        if call.method == "CreateContainer" and must_refuse:
            message = f"cannot place the container: internal error: {type(error).__name__}: {error}"
            call.refuse(GrpcStatus.INTERNAL, message)
        else:
            call.release()

    def _hold(self, call: HeldCall, work: Coroutine[object, object, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001  as in _handle
                self._fault(call, error)

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _when_synced(self, call: HeldCall) -> None:
        try:
            async with asyncio.timeout(self.keeper.options.call_timeout):
                await self.keeper.synced.wait()
        except TimeoutError:
            self.keeper.telemetry.problem(UNSYNCED, method=call.method)
            self.keeper.attention.set()
            if call.method == "CreateContainer" and self.keeper.store.mode.enforces and self._is_strict(call):
                call.refuse(
                    GrpcStatus.UNAVAILABLE, "cannot place the container: not in step with the runtime yet"
                )
                return
            call.release()
            return
        if self.awaited is not None:
            await self.awaited.wait()
        if not call.done:
            self._handle(call)

    def _is_strict(self, call: HeldCall) -> bool:
        """Tell whether a call's pod would rather not run than run anywhere, or may be such a pod."""
        pod = self._pod(call)
        if pod is None:
            return True
        return self.keeper.state.node.refuses_unplaced(pod)

    def _pod(self, call: HeldCall) -> Pod | None:
        """Read whose sandbox or container a call makes, from as little of the request as possible."""
        sandbox_id, known, bounds = "", self.keeper.state.pods, self.keeper.state.node.machine.bounds
        try:
            if call.method == "RunPodSandbox":
                return pod_of(pb.RunPodSandboxFacts.FromString(call.body).config, bounds=bounds)
            pieces = pb.CreateContainerPieces.FromString(call.body)
            sandbox_id = text(pieces.pod_sandbox_id)
            config = pb.SandboxFacts.FromString(b"".join(pieces.sandbox_config))
        except DecodeError:
            return known.get(sandbox_id)
        if not pieces.sandbox_config and sandbox_id in known:
            return known[sandbox_id]
        return pod_of(config, sandbox_id, bounds)


MAKING = frozenset(("RunPodSandbox", "CreateContainer"))
"""Methods that make what is placed."""
METHODS = frozenset(
    f"/runtime.{version}.RuntimeService/{method}"
    for version in ("v1", "v1alpha2")
    for method in (
        "RunPodSandbox",
        "StopPodSandbox",
        "RemovePodSandbox",
        "CreateContainer",
        "StartContainer",
        "StopContainer",
        "RemoveContainer",
        "UpdateContainerResources",
    )
)
"""Full paths of the intercepted methods."""
