"""Pods of an author that wants to hurt the node or other tenants: their labels and annotations.

Every pod here requests a tenth of a CPU or nothing, in a namespace that is not trusted. So it must get no
exclusive CPU, whatever its author writes, and the node must be as it would be without these pods. Texts are
as large as the API server allows (256 KiB for all annotations of an object).

Used by ``tests/security``, ``hostile_calls.py``, ``hostile_day.py`` and ``hostile_start.py``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

QOS = "koordinator.sh/qosClass"
STATUS = "scheduling.koordinator.sh/resource-status"
SPEC = "scheduling.koordinator.sh/resource-spec"
NUMA_SPEC = "scheduling.koordinator.sh/numa-topology-spec"
VOLCANO_POLICY = "volcano.sh/numa-topology-policy"
VOLCANO_DECISION = "volcano.sh/topology-decision"
SKIP = "runtimeproxy.koordinator.sh/skip-hookserver"
KEYS = (STATUS, SPEC, NUMA_SPEC, VOLCANO_POLICY, VOLCANO_DECISION)
NAMESPACE = "tenant-evil"
CLASSES = ("", "LSE", "LSR", "LS", "BE", "SYSTEM", "LSX")
PARENTS = ("", "burstable", "besteffort")
"""The path between ``/kubepods`` and the pod for each Kubernetes QoS class; empty for Guaranteed."""
NOT_UTF8_STAND_IN = "QQbrokenQQ"
"""Stands for bytes that are not UTF-8 until a message has been serialized."""
NOT_UTF8 = b"\xff\xfe\xc3\x28\xed\xa0\x80\x80\xf8\x88"
assert len(NOT_UTF8) == len(NOT_UTF8_STAND_IN)
TENTH_OF_A_CPU = {"cpu_period": 100_000, "cpu_quota": 10_000, "cpu_shares": 102}
NO_CPU_LIMIT = {"cpu_period": 100_000, "cpu_shares": 2}


@dataclass(frozen=True, slots=True)
class HostilePod:
    """One pod.

    Attributes:
        kind: The attack, a name in ``ATTACKS``.
        labels, annotations: As its author wrote them.
        parent: One of ``PARENTS``.
        resources: Fields of LinuxContainerResources.
    """

    kind: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    parent: str = "burstable"
    resources: Mapping[str, int] = field(default_factory=lambda: dict(TENTH_OF_A_CPU))

    @property
    def size(self) -> int:
        """Bytes of all annotations; the API server allows 256 KiB."""
        return sum(len(key) + len(value.encode()) for key, value in self.annotations.items())


@dataclass(frozen=True, slots=True)
class HonestPod:
    """A pod that requests only CPUs that it may have.

    Attributes:
        name, namespace: Of the pod.
        label: Its QoS class of Koordinator.
        parent: One of ``PARENTS``.
        cpus: The CPUs that the scheduler's annotation names.
        whole: How many whole CPUs it requests.
    """

    name: str
    label: str = ""
    parent: str = ""
    cpus: str = ""
    whole: int = 0
    namespace: str = "tenant-good"

    @property
    def labels(self) -> dict[str, str]:
        return {QOS: self.label} if self.label else {}

    @property
    def annotations(self) -> dict[str, str]:
        return {STATUS: json.dumps({"cpuset": self.cpus})} if self.cpus else {}

    @property
    def resources(self) -> dict[str, int]:
        if self.whole:
            return {
                "cpu_period": 100_000,
                "cpu_quota": self.whole * 100_000,
                "cpu_shares": self.whole * 1024,
            }
        return NO_CPU_LIMIT if self.parent == "besteffort" else {"cpu_period": 100_000, "cpu_shares": 512}


def with_invalid_utf8(message: bytes) -> bytes:
    """Replace the stand-in in a message by the bytes that are not UTF-8."""
    return message.replace(NOT_UTF8_STAND_IN.encode(), NOT_UTF8)


def _status(**members: object) -> dict[str, str]:
    return {STATUS: json.dumps(members)}


def _sparse(dice: random.Random, cpus: int) -> dict[str, str]:
    first, step = dice.randrange(3), dice.choice((2, 3))
    return _status(cpuset=",".join(map(str, range(first, 65_535, step))))


def _repeated(dice: random.Random, cpus: int) -> dict[str, str]:
    return _status(cpuset=",".join(["0-65535"] * dice.choice((10, 31_000))))


def _greedy(dice: random.Random, cpus: int) -> dict[str, str]:
    last = dice.choice((cpus - 2, cpus - 1, cpus, cpus // 2))
    return _status(cpuset=f"0-{last}")


def _single(dice: random.Random, cpus: int) -> dict[str, str]:
    return _status(cpuset=str(dice.randrange(cpus)))


def _escaped(dice: random.Random, cpus: int) -> dict[str, str]:
    return {STATUS: '{"cpu\\u0073et":"0-@"}'.replace("@", str(cpus - 2))}


def _surrogate_key(dice: random.Random, cpus: int) -> dict[str, str]:
    return {STATUS: '{"numaNodeResources":[{"node":0,"resources":{"\\ud800":"abc"}}]}'}


def _surrogates(dice: random.Random, cpus: int) -> dict[str, str]:
    lone = dice.choice(("\\ud800", "\\udfff", "\\ud83d"))
    return dice.choice(
        (
            {STATUS: '{"cpuset":"@"}'.replace("@", lone)},
            {STATUS: '{"numaNodeResources":[{"node":0,"resources":{"cpu":"@"}}]}'.replace("@", lone)},
            {SPEC: '{"requiredCPUBindPolicy":"@"}'.replace("@", lone)},
            {NUMA_SPEC: '{"numaTopologyPolicy":"@"}'.replace("@", lone)},
            {VOLCANO_DECISION: '{"numa":{"@":{"cpu":"1"}}}'.replace("@", lone)},
            {VOLCANO_DECISION: '{"numa":{"0":{"@":"x"}}}'.replace("@", lone)},
        )
    )


def _controls(dice: random.Random, cpus: int) -> dict[str, str]:
    noise = "\x1b[2J\x1b]0;x\x07\r\n\t\x00\x7f\u202e\u2028\ufeff" * dice.choice((1, 40, 4000))
    return dice.choice(({dice.choice(KEYS): noise}, {STATUS: json.dumps({"cpuset": noise})}))


def _nested(dice: random.Random, cpus: int) -> dict[str, str]:
    deep = dice.choice((50, 900, 40_000))
    return {dice.choice(KEYS): dice.choice(("[" * deep, '{"a":' * deep + "1" + "}" * deep))}


def _numbers(dice: random.Random, cpus: int) -> dict[str, str]:
    huge = dice.choice(("1e999999", "9" * 4300, "-0", "0." + "1" * 5000, "9" * 60_000))
    return dice.choice(
        (
            {STATUS: '{"numaNodeResources":[{"node":@,"resources":{"cpu":"1"}}]}'.replace("@", huge)},
            {STATUS: '{"numaNodeResources":[{"node":0,"resources":{"cpu":@}}]}'.replace("@", huge)},
            {STATUS: '{"numaNodeResources":[{"node":0,"resources":{"cpu":"@"}}]}'.replace("@", huge)},
            {STATUS: '{"cpuset":"0-99999999999"}'},
            {STATUS: '{"cpuset":"@"}'.replace("@", huge)},
        )
    )


def _many_nodes(dice: random.Random, cpus: int) -> dict[str, str]:
    one = {"node": dice.choice((0, 1, 63, 1023)), "resources": {"cpu": "1"}}
    return _status(numaNodeResources=[one] * dice.choice((100, 5_000)))


def _many_keys(dice: random.Random, cpus: int) -> dict[str, str]:
    amounts = {f"r{i}": "1" for i in range(dice.choice((1_000, 15_000)))}
    return _status(numaNodeResources=[{"node": 0, "resources": amounts}])


def _bound(dice: random.Random, cpus: int) -> dict[str, str]:
    node = dice.choice((0, 1, 7, -1, 1 << 31))
    return dice.choice(
        (
            _status(numaNodeResources=[{"node": node, "resources": {"cpu": "4"}}]),
            _status(cpuSharedPools=[{"socket": 0, "node": node}]),
            {VOLCANO_DECISION: json.dumps({"numa": {str(node): {"cpu": "4"}}})},
        )
    )


def _policies(dice: random.Random, cpus: int) -> dict[str, str]:
    return {
        SPEC: json.dumps(
            {
                "requiredCPUBindPolicy": dice.choice(("FullPCPUs", "SpreadByPCPUs", "x" * 70_000)),
                "preferredCPUExclusivePolicy": dice.choice(("PCPULevel", "NUMANodeLevel", "\n" * 300)),
            }
        ),
        NUMA_SPEC: json.dumps(
            {
                "numaTopologyPolicy": dice.choice(("SingleNUMANode", "Restricted", "y" * 70_000)),
                "singleNUMANodeExclusive": dice.choice(("Required", "Preferred", "z" * 70_000)),
            }
        ),
        VOLCANO_POLICY: dice.choice(("single-numa-node", "restricted", "w" * 30_000)),
    }


def _huge(dice: random.Random, cpus: int) -> dict[str, str]:
    return {dice.choice(KEYS): dice.choice(("x", '"', "\\", "{}", "[],", "\u00e9")) * 60_000}


def _many(dice: random.Random, cpus: int) -> dict[str, str]:
    return {f"evil.example/{i}": "x" * 40 for i in range(4_000)} | _greedy(dice, cpus)


def _broken(dice: random.Random, cpus: int) -> dict[str, str]:
    return dice.choice(
        ({"evil.example/x": NOT_UTF8_STAND_IN}, {STATUS: f'{{"cpuset":"{NOT_UTF8_STAND_IN}"}}'})
    )


def _nothing(dice: random.Random, cpus: int) -> dict[str, str]:
    return {}


ATTACKS: Mapping[str, Callable[[random.Random, int], dict[str, str]]] = {
    "greedy": _greedy,
    "single": _single,
    "escaped": _escaped,
    "sparse": _sparse,
    "repeated": _repeated,
    "surrogate-key": _surrogate_key,
    "surrogates": _surrogates,
    "controls": _controls,
    "nested": _nested,
    "numbers": _numbers,
    "many-nodes": _many_nodes,
    "many-keys": _many_keys,
    "bound": _bound,
    "policies": _policies,
    "huge": _huge,
    "many": _many,
    "broken": _broken,
    "nothing": _nothing,
}
"""By name: a function that makes the annotations, from dice and the number of the machine's CPUs."""


def attack(kind: str, dice: random.Random, cpus: int) -> HostilePod:
    """Make a pod of a kind of attack."""
    annotations = ATTACKS[kind](dice, cpus)
    label = dice.choice(CLASSES)
    if label == "LSX":
        label = dice.choice(("LSX", "\x1b[31mLSE", "L" * 70_000, "\u202eEBL"))
    labels = {QOS: label} if label else {}
    if dice.random() < 0.2:
        labels[SKIP] = "true"
    parent = dice.choice(PARENTS)
    return HostilePod(
        kind, labels, annotations, parent, NO_CPU_LIMIT if parent == "besteffort" else TENTH_OF_A_CPU
    )


def attacks(
    count: int, seed: int, cpus: int, room: int = 10 << 20, skip: Sequence[str] = ()
) -> list[HostilePod]:
    """Make this many pods, of all kinds in turn.

    Args:
        count: The number of pods.
        seed: The seed of the dice.
        cpus: CPUs of the machine.
        room: Bytes of all annotations together. A runtime's list of sandboxes carries them, and gRPC takes no
            more than 16 MiB.
        skip: Kinds to leave out.
    """
    dice = random.Random(seed)
    kinds = [kind for kind in ATTACKS if kind not in skip]
    found: list[HostilePod] = []
    for number in range(count):
        fair = 2 * room // (count - number)
        for _ in range(20):
            pod = attack(kinds[number % len(kinds)], dice, cpus)
            if pod.size <= max(2_000, fair):
                break
        else:
            pod = attack("greedy", dice, cpus)
        room -= pod.size
        found.append(pod)
    return found
