"""The topology manager at work for one container: hints, policy, allocation, and the record of all three.

Theory (kubelet 1.36, reference B). Every provider says where it could serve the container; the policy makes
one hint of the answers, or refuses; then every provider allocates under that hint. Devices come first, then
CPUs, then memory. Nothing here changes anything: what was decided is a ``Ruling``, and a refusal is one too.

Where kubelet's own device manager has given devices, they are no longer ours to choose: the nodes that they
are near to are one hint, preferred. Under policy ``none`` nothing is merged; kubelet's allocators then go
their own ways, while here CPUs stay on one node where they fit, if they can on that of the devices, and
counted memory is looked for on the nodes of the CPUs first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from proxy.model.asks import PodAsk
from proxy.model.explanation import Merge, Said, Step
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import CpuSet, Mask, union
from proxy.model.memory import Blocks
from proxy.model.options import Policy, Scope
from proxy.model.workload import Near, Part, Verdict
from proxy.place import cpu_static
from proxy.place.binding.wish import BindError
from proxy.place.cpu_policy import CpuRefusedError, CpuState
from proxy.place.cpu_request import container_cpus
from proxy.place.devices import allocate as device_allocation
from proxy.place.devices import hints as device_hints
from proxy.place.devices.allocate import DeviceRefused
from proxy.place.devices.state import DeviceState
from proxy.place.memory import allocate as memory_allocation
from proxy.place.memory import hints as memory_hints
from proxy.place.memory.state import MemoryRefused, MemoryState
from proxy.place.packed import NotEnoughCpus
from proxy.place.pick import pick
from proxy.place.policies import decide
from proxy.place.samples import merge_of, say
from proxy.plan.binding import Binding, choose
from proxy.plan.node import Node

FAILED_PRECONDITION = 9
ANYWHERE = TopologyHint(None, preferred=False)
DEVICES = "devices"

_REFUSALS = (NotEnoughCpus, CpuRefusedError, BindError, MemoryRefused, DeviceRefused)


@dataclass(frozen=True, slots=True)
class Case:
    """What is to be decided, and what is there.

    Attributes:
        node: The machine and the rules.
        asks: The pod.
        cpu: Who owns which CPUs, as the CPU manager reads it.
        memory: Who holds which memory; None where it is not counted.
        devices: Devices that we give out ourselves.
        near: Devices that somebody else has given.
        owns: True where CPUs may be given to one container alone.
        binds: True where memory may be given; False where somebody else has bound it already.
        pod: What was decided for the pod as a whole, where that binds the container too.
        binding: How CPUs are bound; None where the CPU manager's options say.
        policy: What holds for the pod in place of the node's policy; None for that.
        wished: Where somebody wishes it to be; one more hint.
    """

    node: Node
    asks: PodAsk
    cpu: CpuState
    memory: MemoryState | None
    devices: DeviceState
    near: tuple[Near, ...] = ()
    owns: bool = True
    binds: bool = True
    pod: TopologyHint | None = None
    binding: Binding | None = None
    policy: Policy | None = None
    wished: TopologyHint | None = None


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the topology manager decided.

    Attributes:
        verdict: Admit or refuse; on a refusal nothing is given.
        hint: What the allocators followed.
        cpus: Exclusive CPUs; empty where it gets none.
        blocks: Memory by node.
        devices: Resource and ids.
        said, merge, steps: The record.
        reasons: Sentences.
        cpu, memory, given: The providers' states afterwards.
        parts: For a pod as a whole, what each of its containers gets, where those are known.
    """

    verdict: Verdict
    hint: TopologyHint
    cpus: CpuSet = field(default_factory=CpuSet)
    blocks: Blocks = ()
    devices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    said: tuple[Said, ...] = ()
    merge: Merge | None = None
    steps: tuple[Step, ...] = ()
    reasons: tuple[str, ...] = ()
    cpu: CpuState | None = None
    memory: MemoryState | None = None
    given: DeviceState | None = None
    parts: tuple[Part, ...] = ()


def rule(case: Case, name: str) -> Ruling:
    """Decide a container by itself: hints, policy, allocation.

    Args:
        case: What is there; ``case.asks`` has a container of that name.
        name: The container.
    """
    answers: list[tuple[str, Hints]] = [
        (DEVICES, device_hints.container_hints(case.devices, case.asks, name, case.node.nodes)),
        (DEVICES, near_hints(case.near, case.node.nodes)),
        ("cpu", cpu_static.container_hints(case.node.cpu, case.cpu, case.asks, name) if case.owns else None),
    ]
    if case.pod is not None and case.pod.affinity is not None:
        answers.append(("pod", {"pod": (case.pod,)}))
    if case.memory is not None and case.binds:
        answers.append(("memory", memory_hints.container_hints(case.memory, case.asks, name)))
    hint, verdict, said, merge = judge(case, answers, Scope.CONTAINER)
    if not verdict.admitted:
        return Ruling(verdict, hint, said=said, merge=merge)
    return grant(case, name, hint, said, merge)


def judge(
    case: Case, answers: Iterable[tuple[str, Hints]], scope: Scope
) -> tuple[TopologyHint, Verdict, tuple[Said, ...], Merge | None]:
    """Have the policy decide on the providers' answers, and keep a record of them."""
    # A provider that has nothing to say is no part of the record, and to the merge it makes no difference.
    asked = [(provider, hints) for provider, hints in answers if hints]
    node, policy = case.node, case.policy or case.node.policy
    if policy is Policy.NONE:
        return ANYWHERE, Verdict(), (), None
    if asked and case.wished is not None:
        asked.append(("volcano", {"nodes": (case.wished,)}))
    decision = decide(policy, [hints for _, hints in asked], node.nodes, node.distances)
    said = tuple(record for provider, hints in asked for record in say(provider, hints))
    merge = merge_of(decision, scope) if asked else None
    return decision.hint, decision.verdict, said, merge


def grant(
    case: Case,
    name: str,
    hint: TopologyHint,
    said: tuple[Said, ...] = (),
    merge: Merge | None = None,
) -> Ruling:
    """Have every provider allocate for a container under a hint."""
    steps: list[Step] = []
    try:
        given = device_allocation.allocate(case.devices, case.asks, name, hint)
        steps += [Step(DEVICES, reason) for reason in given.reasons]
        cpu, cpus = _cpus(case, name, hint, steps)
        memory, blocks = _memory(case, name, hint, cpus, steps)
    except _REFUSALS as refusal:
        return Ruling(refused(refusal), hint, said=said, merge=merge, steps=tuple(steps))
    return Ruling(
        Verdict(),
        hint,
        cpus,
        blocks,
        tuple(given.devices.items()),
        said,
        merge,
        tuple(steps),
        cpu=cpu,
        memory=memory,
        given=given.state,
    )


def _cpus(case: Case, name: str, hint: TopologyHint, steps: list[Step]) -> tuple[CpuState, CpuSet]:
    node, said = case.node, list[str]()
    wanted = container_cpus(case.asks, case.asks.named(name)) if case.owns else 0
    if not wanted:
        return case.cpu, CpuSet()
    held = case.cpu.of(case.asks.uid, name)
    if held is not None and len(held) == wanted:
        # kubelet would look again whether whole cores are free here; it has them.
        steps.append(Step("cpu", f"keeps CPUs {held}"))
        return cpu_static.given(case.cpu, case.asks, name, held), held
    free = cpu_static.available(node.cpu, case.cpu) | case.cpu.reusable_by(case.asks.uid)
    if case.binding is not None:
        cpus = choose(node.topology, free, wanted, case.binding, hint.affinity, said)
        state = cpu_static.given(case.cpu, case.asks, name, cpus)
    elif hint is ANYWHERE:
        cpu_static.check_smt(node.cpu, case.cpu, wanted)
        near = nodes_of(case.near)
        cpus = pick(node.machine, node.topology, free, wanted, node.options, near, said)
        state = cpu_static.given(case.cpu, case.asks, name, cpus)
    else:
        state = cpu_static.allocate(node.cpu, case.cpu, case.asks, name, hint.affinity, steps=said)
        cpus = state.of(case.asks.uid, name) or CpuSet()
    steps += [Step("cpu", words) for words in said]
    return state, cpus


def _memory(
    case: Case, name: str, hint: TopologyHint, cpus: CpuSet, steps: list[Step]
) -> tuple[MemoryState | None, Blocks]:
    if case.memory is None or not case.binds:
        return case.memory, ()
    wishes = [hint]
    if hint.affinity is None and not hint.preferred and cpus and case.node.follow_mems:
        homes = case.node.machine.nodes_of(cpus) & case.node.machine.memory_nodes
        wishes = [TopologyHint(homes, preferred=False), hint] if homes else wishes
    for wish in wishes[:-1]:
        try:
            granted = memory_allocation.allocate(case.memory, case.asks, name, wish)
            break
        except MemoryRefused as refusal:
            steps.append(Step("memory", f"not on the nodes {wish.affinity} of its CPUs: {refusal}"))
    else:
        granted = memory_allocation.allocate(case.memory, case.asks, name, wishes[-1])
    if granted.blocks:
        steps += [Step("memory", reason) for reason in granted.reasons]
    return granted.state, granted.blocks


def refused(error: Exception) -> Verdict:
    """Make a verdict of what a provider raised, in kubelet's words (kubelet 1.36, reference B.5)."""
    if isinstance(error, BindError):
        return Verdict(FAILED_PRECONDITION, "CPUBindPolicyError", str(error))
    reason = getattr(error, "reason", "UnexpectedAdmissionError")
    text = str(error)
    if reason == "UnexpectedAdmissionError":
        text = f"Allocate failed due to {text}, which is unexpected"
    return Verdict(FAILED_PRECONDITION, reason, text)


def nodes_of(near: Iterable[Near]) -> Mask | None:
    """Give the nodes that devices are near to; None where they are near to none."""
    bits = union(device.nodes.bits for device in near if device.nodes)
    return Mask.from_bits(bits) if bits else None


def near_hints(near: Iterable[Near], nodes: Mask) -> Hints:
    """Make hints of devices that somebody else has given: they are where they are.

    They are preferred unless they are known to lie on more nodes than they would have to.
    """
    found: dict[str, int] = {}
    least: dict[str, int] = {}
    for device in near:
        if device.nodes:
            resource = device.resource or DEVICES
            found[resource] = found.get(resource, 0) | device.nodes.bits & nodes.bits
            least[resource] = device.least or len(nodes)
    return {
        resource: (TopologyHint(Mask.from_bits(bits), bits.bit_count() <= least[resource]),)
        for resource, bits in found.items()
        if bits
    }
