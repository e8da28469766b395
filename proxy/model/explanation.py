"""The record of a decision: why a container was placed where it is, or rejected.

A record holds values only, small enough to keep some hundreds of them: long lists of hints are counted, and
a few are kept. Sentences are made from it on demand, not when it is written.
"""

from __future__ import annotations

from msgspec import Struct, field

from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Verdict

CREATE = "CreateContainer"
"""The event of a decision on a create."""
FOUND = "ContainerFound"
"""The event of a decision on a container that existed already when topoproxy found it."""
RESTORED = "LedgerRead"
"""The event of a placement that a former process decided, and the ledger kept."""
SAMPLE = 6
"""How many hints of a list are kept."""
HOLDERS = 10
"""How many of the containers that hold missing CPUs are named."""


class Fact(Struct, frozen=True):
    """One fact about the request that a decision used.

    Attributes:
        what: Its name, such as ``cpu request``.
        value: Its value as users write it.
        source: Where it came from, such as ``cpu_shares of the CRI request`` or ``kubelet's /pods``.
    """

    what: str
    value: str
    source: str


class ProviderAnswer(Struct, frozen=True):
    """The answer of one provider about one resource.

    Attributes:
        provider: ``cpu``, ``memory`` or ``devices``.
        resource: Name of the resource; empty if the provider has no preference at all.
        nothing: ``no preference`` or ``impossible`` if there are no hints; otherwise empty.
        hints: Some of the hints, preferred ones and fewest nodes first.
        count: How many there are; None if they are too many to be counted.
        preferred: How many of them are preferred; None if they are too many to be counted.
    """

    provider: str
    resource: str
    nothing: str = ""
    hints: tuple[TopologyHint, ...] = ()
    count: int | None = 0
    preferred: int | None = 0


class Merge(Struct, frozen=True):
    """The result of the topology policy.

    Attributes:
        policy: kubelet's name of the policy.
        scope: ``container`` or ``pod``.
        best: The winning hint; its affinity is None for any node.
        runner_up: The best hint with other nodes, if there is one.
        decided: Why the winner comes before the runner-up, as text.
        conflicts: Texts that name the resources that prevent a preferred result; empty if none does.
    """

    policy: str
    scope: str
    best: TopologyHint
    runner_up: TopologyHint | None = None
    decided: str = ""
    conflicts: tuple[str, ...] = ()


class AllocationStep(Struct, frozen=True):
    """One step of an allocator.

    Attributes:
        provider: ``cpu``, ``memory`` or ``devices``.
        what: The step as text, such as ``core 4: CPUs 4,36``.
    """

    provider: str
    what: str


class MovedContainer(Struct, frozen=True):
    """A container that had to leave CPUs.

    Attributes:
        ref: ``namespace/pod/container``.
        before, after: The CPUs that it had, and those that it has.
    """

    ref: str
    before: CpuSet
    after: CpuSet


class CpuHolder(Struct, frozen=True):
    """A container, or a pod as a whole, that has CPUs which a rejected request needs.

    Attributes:
        ref: ``namespace/pod/container`` or ``namespace/pod``, with a remark in brackets.
        cpus: Those CPUs.
    """

    ref: str
    cpus: CpuSet


class Shortfall(Struct, frozen=True):
    """A resource of which some NUMA nodes had too little for a rejected request.

    If they had the missing amount, the request would have been admitted.

    Attributes:
        resource: ``cpu``, ``memory``, ``hugepages-*`` or the name of a device's resource.
        nodes: The NUMA nodes; None for the whole machine.
        wanted, free: The requested and the free amount: CPUs, bytes or devices.
        kept: How many CPUs of the machine no owner may take, because the shared pool needs them.
        most: The most that all owners together may have on an empty machine; None if unknown.
        named: The CPUs that the request names, all of which must be free.
        holders: The containers and pods that have the CPUs; the first ``HOLDERS`` of them.
        more_holders: How many more there are.
    """

    resource: str
    nodes: Mask | None
    wanted: int
    free: int
    kept: int = 0
    most: int | None = None
    named: CpuSet = field(default_factory=CpuSet)
    holders: tuple[CpuHolder, ...] = ()
    more_holders: int = 0

    @property
    def missing(self) -> int:
        """The missing amount; 0 if there is enough."""
        return max(0, self.wanted + self.kept - self.free)


class Explanation(Struct, frozen=True):
    """The record of one decision.

    Attributes:
        event: The call that was decided, such as ``CREATE``; ``FOUND`` or ``RESTORED`` if there was no call.
        pod: ``namespace/name`` of the pod.
        uid: The pod's uid.
        container: The container's name; empty for a decision about the whole pod.
        attempt: The container's attempt, or the sandbox's.
        facts: The facts about the request.
        answers: The answers of the providers.
        merge: The result of the policy; None if no policy applied.
        steps: The steps of the allocators.
        verdict: Admit or reject.
        pool: ``own``, ``shared``, ``be`` or ``system``; empty if nothing was placed.
        cpus: The CPUs: its own, or those of its pool at that time.
        mems: The memory nodes; None if they are left unchanged.
        devices: Names of devices.
        reasons: The decision in sentences.
        moved: Containers that had to leave CPUs for it; the first of them.
        more_moved: How many more had to leave.
        shortfalls: The missing resources of a rejected request, if they are known.
        applied: Whether the plan was applied to the pod; false if the pod was only observed.
    """

    event: str
    pod: str
    uid: str
    container: str = ""
    attempt: int = 0
    facts: tuple[Fact, ...] = ()
    answers: tuple[ProviderAnswer, ...] = ()
    merge: Merge | None = None
    steps: tuple[AllocationStep, ...] = ()
    verdict: Verdict = field(default_factory=Verdict)
    pool: str = ""
    cpus: CpuSet = field(default_factory=CpuSet)
    mems: Mask | None = None
    devices: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    moved: tuple[MovedContainer, ...] = ()
    more_moved: int = 0
    shortfalls: tuple[Shortfall, ...] = ()
    applied: bool = True

    @property
    def ref(self) -> str:
        """``namespace/pod`` or ``namespace/pod/container``, as users write it."""
        return f"{self.pod}/{self.container}" if self.container else self.pod
