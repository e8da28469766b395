"""Write kubelet's state file with the CPUs that are in effect.

Theory. The file of policy ``none`` contains no container. That of ``static`` has, for each container with
exclusive CPUs, the CPUs that it has (by our account), and what kubelet holds for containers that are not
here, where that overlaps with none and leaves a CPU for all others. kubelet drops stale entries when it
starts.

Not everything can be expressed in it: kubelet would not start where a container has a CPU that it keeps back,
or one that is offline. Such a container is left out and named. kubelet then assigns it CPUs in its file, and
its updates are answered with those that the container really has.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.backends.kubelet.checkpoint_writer import CURRENT, none_state, pods_of, static_state
from proxy.backends.kubelet.checkpoints import CheckpointError
from proxy.model.idset import CpuSet
from proxy.takeover.inputs import STRICT, TakeoverInputs
from proxy.takeover.record import TakeoverRecord

Entries = dict[str, dict[str, CpuSet]]
"""Pod uid to container name to CPUs."""


@dataclass(frozen=True, slots=True)
class KubeletStateText:
    """A text for kubelet's file.

    Attributes:
        text: The text.
        left_out: Containers that it cannot express, one sentence each.
    """

    text: str
    left_out: tuple[str, ...] = ()


def kubelet_state_text(record: TakeoverRecord, inputs: TakeoverInputs, target: str) -> KubeletStateText:
    """Write kubelet's file for a policy.

    Args:
        record: How far the takeover has come.
        inputs: The inputs of the takeover.
        target: ``none`` or ``static``.

    Raises:
        CheckpointError: There is no file that kubelet would start with.
    """
    version = inputs.file.version or CURRENT
    if target == "none":
        return KubeletStateText(none_state(version))
    if version == 1:
        raise CheckpointError("cannot write kubelet's file: a kubelet before 1.18 wrote it (version 1)")
    reserved = (record.reserved | inputs.manager.reserved) & inputs.online
    held, left_out = _actual_cpus(inputs, reserved)
    _add_unknown(inputs, held, reserved)
    pods = _cpus_of_pods(inputs, held, reserved) if version > CURRENT else {}
    strict = inputs.manager.options.get(STRICT) == "true" if inputs.manager.options else record.strict
    text = static_state(inputs.online, held, pods=pods, reserved=reserved, strict=strict, version=version)
    return KubeletStateText(text, tuple(left_out))


def _actual_cpus(inputs: TakeoverInputs, reserved: CpuSet) -> tuple[Entries, list[str]]:
    """Return the CPUs that containers really have, and those that the file cannot express."""
    held: Entries = {}
    left_out: list[str] = []
    for each in inputs.owning:
        cpus = each.cpus & inputs.online
        if not cpus or cpus & reserved:
            why = f"CPUs {cpus & reserved} are reserved by kubelet" if cpus else "none of them is online"
            left_out.append(f"{each.ref} has CPUs {each.cpus}: {why}")
        else:
            held.setdefault(each.uid, {})[each.name] = cpus
    return held, left_out


def _add_unknown(inputs: TakeoverInputs, held: Entries, reserved: CpuSet) -> None:
    """Add what kubelet holds for unknown containers, where it does not overlap with CPUs of other pods."""
    owned: dict[str, CpuSet] = {}
    taken = CpuSet()
    for each in inputs.owning:
        owned[each.uid] = owned.get(each.uid, CpuSet()) | each.cpus
        taken |= each.cpus
    spare = inputs.online - taken - reserved
    for uid, names in (inputs.file.held.held if inputs.file.held is not None else {}).items():
        others = taken - owned.get(uid, CpuSet()) | reserved
        for name, cpus in names.items():
            apart = cpus and cpus <= inputs.online and not cpus & others
            if apart and (uid, name) not in inputs.owned and spare - cpus:
                held.setdefault(uid, {})[name] = cpus
                spare -= cpus


def _cpus_of_pods(inputs: TakeoverInputs, held: Entries, reserved: CpuSet) -> dict[str, CpuSet]:
    """Keep the CPUs of pods as a whole as they are, where their containers and no others are inside."""
    assert inputs.file.checkpoint is not None
    found: dict[str, CpuSet] = {}
    for uid, cpus in pods_of(inputs.file.checkpoint).items():
        inside = all(own <= cpus for own in held.get(uid, {}).values())
        others = [own for key, names in held.items() if key != uid for own in names.values()]
        apart = all(own.isdisjoint(cpus) for own in (*others, *found.values(), reserved))
        if uid in inputs.pods and inside and apart and cpus and cpus <= inputs.online:
            found[uid] = cpus
    return found
