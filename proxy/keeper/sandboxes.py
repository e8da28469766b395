"""Pod sandboxes as they come and go, and what is decided for a pod as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from proxy.keeper.bad_input import NOT_AS_ASKED
from proxy.keeper.context import NodeContext
from proxy.keeper.kernel_writes import KernelWrites
from proxy.keeper.lifecycle import Lifecycle
from proxy.keeper.onlooker import Onlooker
from proxy.model.workload import Phase, Pod, Request, Verdict
from proxy.place.memory.accounts import inits_before
from proxy.plan.admit import admit
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.keeper.runtime_ports import RuntimePod


class Sandboxes:
    """The sandboxes of a keeper.

    Attributes:
        arriving: Tokens of sandboxes that are being made, for which something is set aside: no list of the
            runtime's has them.
    """

    def __init__(self, keeper: NodeContext, lifecycle: Lifecycle, writes: KernelWrites) -> None:
        self._keeper = keeper
        self._lifecycle = lifecycle
        self._writes = writes
        self.arriving: set[str] = set()

    def admit(self, pod: Pod, total: Request) -> tuple[Verdict, Pod]:
        """Decide a pod before its sandbox is made; what is set aside for it is taken at once.

        Returns:
            The verdict, and the pod under a token, which ``running`` or ``failed`` must follow.
        """
        keeper = self._keeper
        token = keeper.token("pod")
        keeper.bad_input.see(pod)
        admission = admit(keeper.state, dataclasses.replace(pod, sandbox_id=token), total)
        admitted = admission.verdict.admitted
        if admission.explanation is not None:
            keeper.history.note(keeper.wall(), admission.explanation, token if admitted else "")
        words = admission.problem or admission.verdict.operator_message
        keeper.bad_input.limited(pod, admission.limit, words, admitted=admitted)
        if admission.problem and admission.limit is None:
            keeper.telemetry.problem(NOT_AS_ASKED, pod=pod.ref, reason=admission.problem)
        if not admitted:
            keeper.telemetry.count(metrics.PODS_REFUSED)
            why = admission.verdict.operator_message
            keeper.telemetry.frequent("refused a pod", pod=pod.ref, err=why)
        elif admission.pod.aside is not None:
            self.arriving.add(token)
            keeper.store.change(admission.state, "pod admitted", records={f"p/{token}": admission.pod})
            aside = admission.pod.aside
            keeper.telemetry.event("reserved CPUs and memory for a pod", pod=pod.ref, cpus=aside.cpus)
        return admission.verdict, admission.pod

    def failed(self, token: str) -> None:
        """A sandbox came to nothing, or nobody knows: what was set aside for it is free again."""
        keeper = self._keeper
        keeper.history.gone(token)
        if token in self.arriving:
            self.arriving.discard(token)
            self._drop(token, "sandbox failed")

    def running(self, pod: Pod, token: str = "") -> None:
        """A sandbox has been made; what an earlier sandbox of the same pod still holds goes.

        Args:
            pod: The pod with the sandbox's id.
            token: What it was admitted under.
        """
        keeper = self._keeper
        keeper.bad_input.see(pod)
        keeper.history.renamed(token, pod.sandbox_id)
        if token in self.arriving:
            self.arriving.discard(token)
            self._drop(token, "sandbox named")
        old = [
            c.id
            for c in keeper.state.containers.values()
            if c.pod.uid == pod.uid != ""
            and c.pod.sandbox_id != pod.sandbox_id
            and c.pod.attempt < pod.attempt
            and c.phase is not Phase.CREATING
        ]
        for container_id in old:
            self._lifecycle.phase(container_id, Phase.EXITED)
        keeper.store.change(
            keeper.state.with_pod(pod), "sandbox running", records={f"p/{pod.sandbox_id}": pod}
        )
        if keeper.store.mode.enforces and keeper.state.owners:
            keeper.spawn(self._writes.clear_sandboxes())

    def moved_on(self, pod: Pod, name: str) -> None:
        """A container is asked for: the init containers before it have ended, although nobody has said so."""
        if pod.asks is None:
            return
        ended = inits_before(pod.asks, name)
        for container in self._keeper.state.in_sandbox(pod.sandbox_id) if ended else ():
            if container.name in ended and container.phase is Phase.RUNNING:
                self._lifecycle.phase(container.id, Phase.EXITED)

    def stopped(self, sandbox_id: str) -> None:
        """A sandbox has been stopped: nothing in it runs any more."""
        keeper = self._keeper
        for container in keeper.state.in_sandbox(sandbox_id):
            if container.phase is not Phase.CREATING:
                self._lifecycle.phase(container.id, Phase.EXITED)
        self._forget(sandbox_id)

    def removed(self, sandbox_id: str) -> None:
        """A sandbox is gone, and its containers with it."""
        keeper = self._keeper
        self._lifecycle.removed(
            [c.id for c in keeper.state.in_sandbox(sandbox_id) if c.phase is not Phase.CREATING]
        )
        self._forget(sandbox_id)
        keeper.store.notify(Onlooker.pod_gone, sandbox_id)

    def missing(self, sandbox_id: str, listed: Iterable[RuntimePod]) -> None:
        """The runtime does not list a sandbox: it is gone, or got its name while we were not there."""
        keeper = self._keeper
        pod = keeper.state.pods.get(sandbox_id)
        if pod is not None and pod.aside is not None:
            for found in listed:
                if (found.uid, found.attempt, found.ready) == (pod.uid, pod.attempt, True):
                    ours = keeper.state.pods.get(found.id)
                    if ours is None or ours.aside is None:
                        self.running(dataclasses.replace(pod, sandbox_id=found.id))
                    break
        self.removed(sandbox_id)

    def _forget(self, sandbox_id: str) -> None:
        """What was promised to a pod ends with its sandbox."""
        keeper = self._keeper
        keeper.news.left(sandbox_id)
        keeper.history.gone(sandbox_id)
        pod = keeper.state.pods.get(sandbox_id)
        if pod is not None:
            self._drop(sandbox_id, "sandbox gone")
            keeper.store.notify(Onlooker.pod_stopped, pod)

    def _drop(self, sandbox_id: str, reason: str) -> None:
        store = self._keeper.store
        store.change(store.state.without_pod(sandbox_id), reason, records={f"p/{sandbox_id}": None})
