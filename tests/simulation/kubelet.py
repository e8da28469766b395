"""The simulated kubelet: pods of all classes that come, run for a while and go; and its calls.

Each pod is a generator: it yields pauses and calls, and is resumed with the answer of a call. A call is made
at the daemon; what was forwarded is carried out by the runtime, and the answer comes back through the daemon.
Answers may be lost, false, late, or come when the client has gone.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proxy.api.cri import api_pb2 as pb
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet
from tests.simulation.faults import LATE_LIMIT_S
from tests.simulation.pods import KINDS, PodKind
from tests.simulation.runtime import CREATED, EXITED, RUNNING, RefusedError

if TYPE_CHECKING:
    from proxy.frontends.cri.call import InterceptedCall
    from tests.simulation.daemon import SimulatedDaemon
    from tests.simulation.node import SimulatedNode

PLACING_METHODS = ("RunPodSandbox", "CreateContainer", "StartContainer", "UpdateContainerResources")
HANG_LIMIT_S = 8.0
"""A call that hangs, and whose client waits, is carried out within this time."""
NO_ANSWER = -1
"""Stands for the status of a call that was never answered."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for some seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """Make a call."""

    method: str
    message: Any


PodLife = Generator[Pause | Call, tuple[int, bytes], None]


class KubeletCall:
    """A call under way. It is the ``_Owner`` of its ``InterceptedCall``: the connection that it is on.

    Attributes:
        life: The pod that waits for the answer.
        body: What was forwarded; None while it is held.
        gone: The client does not wait any more.
        gone_at: Since when.
        undecided: It was forwarded unchanged: the daemon did not know the node, or the node is released.
        chosen: The CPUs that the daemon has chosen for the pod whose sandbox it makes.
    """

    def __init__(
        self,
        kubelet: SimulatedKubelet,
        life: PodLife | None,
        daemon: SimulatedDaemon,
        what: Call,
        serial: int,
    ) -> None:
        self.kubelet = kubelet
        self.life = life
        self.daemon = daemon
        self.method = what.method
        self.serial = serial
        self.sent_at = kubelet.node.schedule.now
        self.body: bytes | None = None
        self.over = self.gone = self.undecided = self._is_entering = False
        self.gone_at = 0.0
        self.chosen = 0
        self.call: InterceptedCall = daemon.call(self, serial, what.method, what.message.SerializeToString())

    def arrive(self) -> None:
        """The daemon gets the request."""
        node = self.kubelet.node
        if not self.daemon.alive or self.over:
            self.kubelet.time_out(self)
            return
        node.schedule.count_event(
            "call", f"{self.serial} {self.method} {_description(self.method, self.call.body)}"
        )
        self.sent_at = node.schedule.now
        self.daemon.loop.enter(self._enter)

    def _enter(self) -> None:
        """Let the proxy handle the request; what that decides is sent after it, as on a connection."""
        self._is_entering = True
        self.daemon.call_flow.request(self.call)
        self._is_entering = False
        if self.over:
            self.daemon.call_flow.finished(self.call, None)

    def release(self, stream: int, body: bytes | None, suffix: bytes = b"") -> None:
        """The daemon forwards the call."""
        node = self.kubelet.node
        self.body = (self.call.body if body is None else body) + suffix
        node.schedule.trace(f"forward {self.serial} {self.method} {_description(self.method, self.body)}")
        node.promises.forwarded(self)
        if self.method == "CreateContainer":
            node.disturbances.create_forwarded()
        node.schedule.after(node.delays.wire(), self.kubelet.carry_out, self)

    def refuse(self, stream: int, code: int, message: str) -> None:
        """The daemon answers the call itself."""
        node = self.kubelet.node
        node.schedule.trace(f"refuse {self.serial} {self.method} {code} {message[:80]}")
        node.promises.decided(self)
        self.call.decided = self.call.done = self.over = True
        if not self._is_entering:
            self.daemon.call_flow.finished(self.call, None)
        node.schedule.after(node.delays.wire(), self.kubelet.resume, self, code, b"")


def _description(method: str, body: bytes) -> str:
    """Describe a call, for the trace."""
    message = getattr(pb, f"{method}Request").FromString(body)
    if method == "CreateContainer":
        meta, cpus = message.config.metadata, message.config.linux.resources.cpuset_cpus
        return f"{message.pod_sandbox_id} {meta.name} {meta.attempt} {cpus}"
    if method == "UpdateContainerResources":
        return f"{message.container_id} {message.linux.cpuset_cpus}"
    if method == "RunPodSandbox":
        return str(message.config.metadata.uid)
    return str(getattr(message, "container_id", "") or getattr(message, "pod_sandbox_id", ""))


def _limits(cpus: int) -> pb.LinuxContainerResources:
    """Return resources that request this number of whole CPUs."""
    return pb.LinuxContainerResources(cpu_shares=1024 * cpus, cpu_quota=100_000 * cpus, cpu_period=100_000)


class SimulatedKubelet:
    """Makes pods, and calls for them."""

    def __init__(self, node: SimulatedNode, seed: str) -> None:
        self.node = node
        self.dice = random.Random(f"{seed} kubelet")
        self.kubelet_calls: dict[KubeletCall, None] = {}
        self.pods: dict[str, CpuSet] = {}
        self.waiting: list[tuple[PodLife, int, bytes]] = []
        self.awaits_successor = False  # no daemon accepts: a successor will
        self.requested_cpu_counts: dict[
            str, set[int]
        ] = {}  # by sandbox: how many CPUs a resized pod has requested
        self._serial = 0
        self._calls = 0

    # -- calls --------------------------------------------------------------------------------------------

    def advance(self, life: PodLife, status: int = 0, message: bytes = b"") -> None:
        """Let a pod continue."""
        if self.node.faults.calm:
            self.waiting.append((life, status, message))
            return
        try:
            step = life.send((status, message))
        except StopIteration:
            return
        self._make_step(life, step)

    def begin(self, life: PodLife) -> None:
        """Begin a pod's life."""
        try:
            self._make_step(life, next(life))
        except StopIteration:
            return

    def resume_pods(self) -> None:
        """Let the pods continue after the node was calm."""
        waiting, self.waiting = self.waiting, []
        for life, status, message in waiting:
            self.node.schedule.after(self.node.delays.wire(), self.advance, life, status, message)

    def _make_step(self, life: PodLife, step: Pause | Call) -> None:
        schedule = self.node.schedule
        if isinstance(step, Pause):
            schedule.after(step.seconds, self.advance, life)
        elif self.awaits_successor:
            schedule.after(0.05, self._make_step, life, step)
        elif (daemon := self.node.daemon) is None:
            schedule.after(0.1, self.advance, life, NO_ANSWER)
        else:
            self._calls += 1
            kubelet_call = KubeletCall(self, life, daemon, step, self._calls)
            self.kubelet_calls[kubelet_call] = None
            schedule.after(self.node.delays.wire(), kubelet_call.arrive)
            if self.node.faults.happens(self.node.faults.rates.client_gone):
                schedule.after(self.dice.random() * 2.0, self.disconnect, kubelet_call)

    def open_at(self, daemon: SimulatedDaemon) -> list[KubeletCall]:
        """Return the calls that are open at a daemon."""
        return [
            kubelet_call
            for kubelet_call in self.kubelet_calls
            if kubelet_call.daemon is daemon and not kubelet_call.over
        ]

    def is_placing(self, daemon: SimulatedDaemon) -> bool:
        """Return whether a call that decides where containers are is open at a daemon."""
        return any(kubelet_call.method in PLACING_METHODS for kubelet_call in self.open_at(daemon))

    def refuse_undecided(self, daemon: SimulatedDaemon, code: int, message: str) -> None:
        """A daemon refuses all calls that it holds."""
        for kubelet_call in self.open_at(daemon):
            kubelet_call.call.refuse(code, message)

    def disconnect(self, kubelet_call: KubeletCall) -> None:
        """Disconnect the client of a call; the runtime may execute the call nevertheless."""
        if kubelet_call.over or kubelet_call.gone:
            return
        node = self.node
        kubelet_call.gone = kubelet_call.over = True
        kubelet_call.gone_at = node.schedule.now
        if kubelet_call.daemon.alive:
            node.schedule.count_event("cancellation", f"{kubelet_call.serial} {kubelet_call.method}")
            node.promises.decided(kubelet_call)
            kubelet_call.daemon.answered(kubelet_call.call, None, b"")
        self.time_out(kubelet_call)

    def time_out(self, kubelet_call: KubeletCall) -> None:
        """Time out: no answer arrives."""
        self._mark_gone(kubelet_call)
        self.resume(kubelet_call, NO_ANSWER, b"")

    def _mark_gone(self, kubelet_call: KubeletCall) -> None:
        kubelet_call.gone_at = kubelet_call.gone_at if kubelet_call.gone else self.node.schedule.now
        kubelet_call.over = kubelet_call.gone = True

    def resume(self, kubelet_call: KubeletCall, status: int, message: bytes) -> None:
        """The client has its answer."""
        self.kubelet_calls.pop(kubelet_call, None)
        life, kubelet_call.life = kubelet_call.life, None
        if life is not None:
            self.advance(life, status, message)

    # -- the outcome of a call at the runtime ------------------------------------------------------------

    def carry_out(self, kubelet_call: KubeletCall) -> None:
        """A forwarded call is at the runtime."""
        node, faults = self.node, self.node.faults
        if not node.runtime.up:
            self.answer(kubelet_call, GrpcStatus.UNAVAILABLE, b"")
        elif kubelet_call.method == "StartContainer" and faults.happens(faults.rates.start_hangs):
            node.hanging.begin(kubelet_call)
            node.disturbances.call_hangs()
        elif kubelet_call.gone or not kubelet_call.daemon.alive:
            node.carry_out_late(lambda: self._execute(kubelet_call))
        else:
            rates = faults.rates
            rate = rates.sandbox_hangs if kubelet_call.method == "RunPodSandbox" else rates.call_hangs
            hangs = kubelet_call.method in PLACING_METHODS and faults.happens(rate)
            takes = faults.dice.random() * HANG_LIMIT_S if hangs else node.delays.runtime()
            if hangs:
                node.disturbances.call_hangs()
            node.schedule.after(takes, self._carried_out, kubelet_call, node.runtime.answers_since)

    def _carried_out(self, kubelet_call: KubeletCall, since: float) -> None:
        node, faults = self.node, self.node.faults
        if kubelet_call.gone and node.schedule.now - kubelet_call.gone_at > LATE_LIMIT_S:
            return  # the runtime has cancelled it
        if not node.runtime.up or node.runtime.answers_since != since:
            self.answer(kubelet_call, GrpcStatus.UNAVAILABLE, b"")
            return
        if faults.happens(faults.rates.call_fails):
            if self.dice.random() < 0.5:
                self._execute(kubelet_call)  # what it answers is not true
            self.answer(kubelet_call, GrpcStatus.UNKNOWN, b"")
            return
        status, message = self._execute(kubelet_call)
        if faults.happens(faults.rates.answer_lost):
            self.disconnect(kubelet_call)
        else:
            self.answer(kubelet_call, status, message)

    def _execute(self, kubelet_call: KubeletCall) -> tuple[int, bytes]:
        self.node.runtime.undecided = kubelet_call.undecided
        try:
            return 0, self.node.runtime.execute_call(kubelet_call.method, kubelet_call.body or b"")
        except RefusedError as error:
            return error.code, b""
        finally:
            self.node.runtime.undecided = False

    def answer(self, kubelet_call: KubeletCall, status: int, message: bytes) -> None:
        """The runtime answers."""
        self.node.schedule.after(self.node.delays.wire(), self._answered, kubelet_call, status, message)

    def _answered(self, kubelet_call: KubeletCall, status: int, message: bytes) -> None:
        if kubelet_call.over:
            return
        kubelet_call.over = True
        if not kubelet_call.daemon.alive:
            self.time_out(kubelet_call)
            return
        text = f"{kubelet_call.serial} {kubelet_call.method} {status} {message.decode(errors='replace')[2:]}"
        self.node.schedule.count_event("answer", text)
        if kubelet_call.method == "RunPodSandbox" and status == 0:
            self.node.promises.sandbox_answered(kubelet_call, message)
        elif kubelet_call.method == "CreateContainer" and status != 0:
            self.node.promises.create_failed(kubelet_call)
        kubelet_call.daemon.answered(kubelet_call.call, status, message)
        self.node.promises.decided(kubelet_call)
        self.resume(kubelet_call, status, message)

    def drop_connections(self, daemon: SimulatedDaemon) -> None:
        """A daemon has ended, and its connections with it."""
        for kubelet_call in [t for t in self.kubelet_calls if t.daemon is daemon]:
            self._mark_gone(kubelet_call)
            self.node.schedule.after(self.node.delays.wire(), self.time_out, kubelet_call)

    # -- pods ---------------------------------------------------------------------------------------------

    def _choose_free_cpus(self, count: int) -> CpuSet | None:
        """Choose CPUs as Koordinator's scheduler does, by what it knows: the pods that it has placed."""
        taken = {cpu for cpus in self.pods.values() for cpu in cpus}
        free = [
            cpu
            for cpu in self.node.kernel.full_machine.online
            if cpu not in taken and cpu >= self.node.options.stable_cpu_count
        ]
        return CpuSet(self.dice.sample(free, count)) if len(free) > count + 2 else None

    def add_pod(self) -> None:
        """Add one more pod."""
        kind = self.dice.choices(KINDS, [kind.weight for kind in KINDS])[0]
        named = self._choose_free_cpus(kind.named) if kind.named else CpuSet()
        if named is not None:
            self._begin_pod(kind, named)

    def _begin_pod(self, kind: PodKind, named: CpuSet, name: str = "") -> None:
        self._serial += 1
        uid = f"u{self._serial}"
        self.pods[uid] = named
        self.begin(self._pod(uid, name or uid, kind, named))

    def _replace(self, uid: str, name: str, kind: PodKind) -> None:
        """Add another pod of the same name, while the one that it replaces still terminates.

        That is so after a forced deletion: the scheduler counts the CPUs of the old one as free.
        """
        if uid in self.pods and self.node.faults.happens(self.node.faults.rates.named_alike):
            self._begin_pod(kind, self.pods.pop(uid), name)

    def _config(self, uid: str, name: str, kind: PodKind, named: CpuSet) -> pb.PodSandboxConfig:
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=name, uid=uid, namespace="ns"),
            linux=pb.LinuxPodSandboxConfig(
                cgroup_parent=f"/kubepods/{kind.kube}/pod{uid}".replace("//", "/")
            ),
        )
        if kind.qos:
            config.labels["koordinator.sh/qosClass"] = kind.qos
        if kind.chosen:
            config.linux.resources.CopyFrom(_limits(kind.chosen))
        if named:
            config.annotations["scheduling.koordinator.sh/resource-status"] = f'{{"cpuset":"{named}"}}'
        return config

    def _pod(self, uid: str, name: str, kind: PodKind, named: CpuSet) -> PodLife:
        dice, runtime = self.dice, self.node.runtime
        config = self._config(uid, name, kind, named)
        whole = kind.whole or kind.chosen
        quota = 100_000 * whole if whole else -1
        self.node.make_pod_group(config.linux.cgroup_parent, quota)
        sandbox_id = ""
        for _ in range(4):
            status, message = yield Call("RunPodSandbox", pb.RunPodSandboxRequest(config=config))
            if status == 0:
                sandbox_id = pb.RunPodSandboxResponse.FromString(message).pod_sandbox_id
                break
            yield Pause(dice.random())
            sandbox_id = next((s.id for s in runtime.sandboxes.values() if s.uid == uid), "")
            if sandbox_id:
                break
        if sandbox_id:
            yield from self._containers(sandbox_id, config, kind)
            self._replace(uid, name, kind)
            yield from self._until_done("StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=sandbox_id))
            yield from self._until_done(
                "RemovePodSandbox", pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox_id)
            )
        self.pods.pop(uid, None)

    def _until_done(self, method: str, message: Any) -> PodLife:
        for _ in range(50):
            status, _answer = yield Call(method, message)
            if status in (GrpcStatus.OK, GrpcStatus.NOT_FOUND):
                return
            yield Pause(0.2 + self.dice.random())

    def _containers(self, sandbox_id: str, config: pb.PodSandboxConfig, kind: PodKind) -> PodLife:
        """Run the containers of a pod, one after the other or two at the same time."""
        dice, faults, attempt = self.dice, self.node.faults, 0
        names = ("c", "d") if dice.random() < 0.3 else ("c",)
        left = {name: dice.randint(1, 3) for name in names}
        patience = 12
        until = self.node.schedule.now + 2.0 + dice.random() * 30.0
        while self.node.schedule.now < until and patience > 0:
            name = dice.choice(names)
            mine = [c for c in self.node.runtime.containers_in(sandbox_id) if c.name == name]
            live = [c for c in mine if c.state != EXITED]
            if not live and left[name] > 0:
                attempt += 1
                patience -= 1
                yield from self._create(sandbox_id, config, kind, name, attempt)
            elif not live:
                patience -= 1
                yield Pause(dice.random())
            elif live[0].state == CREATED:
                patience -= 1
                start = pb.StartContainerRequest(container_id=live[0].id)
                if faults.happens(faults.rates.update_beside_start):
                    self.begin(self._meanwhile(self._update(live[0].id)))
                status, _answer = yield Call("StartContainer", start)
                if status == 0:
                    left[name] -= 1
                elif status > 0:
                    yield from self._remove(live[0].id)
            else:
                yield from self._run(live[0].id)

    def _run(self, container_id: str) -> PodLife:
        """Let a container run for a while, with what may happen to it."""
        dice, what = self.dice, self.dice.random()
        if what < 0.55:
            yield Pause(0.2 + dice.random() * 2.0)
        elif what < 0.8:
            yield from self._update(container_id)
        elif what < 0.9:
            container = self.node.runtime.containers.get(container_id)
            if container is not None and container.state == RUNNING:
                self.node.runtime.end(container)  # its process exits
            yield Pause(dice.random())
        else:
            yield Call("StopContainer", pb.StopContainerRequest(container_id=container_id))
            if dice.random() < 0.7:
                yield from self._remove(container_id)

    def _meanwhile(self, life: PodLife) -> PodLife:
        """Do something at the same time as a call that begins now."""
        yield Pause(self.node.delays.runtime())
        yield from life

    def _update(self, container_id: str) -> PodLife:
        request = pb.UpdateContainerResourcesRequest(container_id=container_id)
        request.linux.cpuset_cpus = self.dice.choice(("", "0-3", str(self.node.kernel.full_machine.online)))
        request.linux.cpu_quota = self.dice.choice((0, 0, 150_000))
        yield Call("UpdateContainerResources", request)

    def _remove(self, container_id: str) -> PodLife:
        yield from self._until_done("RemoveContainer", pb.RemoveContainerRequest(container_id=container_id))

    def _create(
        self, sandbox_id: str, config: pb.PodSandboxConfig, kind: PodKind, name: str, attempt: int
    ) -> PodLife:
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox_id, sandbox_config=config)
        request.config.metadata.name, request.config.metadata.attempt = name, attempt
        resources = request.config.linux.resources
        if kind.whole:
            resources.CopyFrom(_limits(kind.whole))
        elif kind.chosen:
            resources.cpu_shares = 512
            if self.dice.random() < 0.3:  # the pod was resized
                count = self.dice.randint(1, 3)
                request.sandbox_config.linux.resources.CopyFrom(_limits(count))
                self.requested_cpu_counts.setdefault(sandbox_id, {kind.chosen}).add(count)
        elif kind.named:
            resources.cpu_shares = 1024 * kind.named
        else:
            resources.cpu_shares = 2 if kind.kube == "besteffort" else 256
        if self.node.faults.happens(self.node.faults.rates.stop_beside_create):
            stop = pb.StopPodSandboxRequest(pod_sandbox_id=sandbox_id)
            self.begin(self._meanwhile(self._until_done("StopPodSandbox", stop)))
        status, _answer = yield Call("CreateContainer", request)
        if status != 0:
            yield Pause(0.1 + self.dice.random())
