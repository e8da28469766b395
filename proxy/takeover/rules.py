"""The steps of a takeover as rules: their preconditions, and their effect on the record.

Pure: a record and the inputs in, a record out, or a refusal that says what to do. A returned record with a
write under way (``pending``) requests that write; ``record`` explains how the write survives a crash.

Each step can be repeated: it does nothing that is already done.

Theory of kubelet's state file with the CPUs that are in effect. The file of policy ``none`` contains no
container. That of ``static`` has the CPUs of each container with exclusive CPUs, according to our own state.
It also has the CPUs that kubelet holds for containers that are unknown here, if they overlap with no other
CPUs and leave a CPU for all others. kubelet drops stale entries when it starts.

Not everything can be expressed in the file: kubelet would not start if a container had a CPU that kubelet
reserves, or an offline CPU. Such a container is left out, and the report names it. kubelet then assigns CPUs
to it in its own file, and topoproxy answers kubelet's updates with the CPUs that the container really has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from proxy.backends.kubelet.checkpoint_writer import CURRENT_VERSION, none_state, pod_level_cpus, static_state
from proxy.backends.kubelet.checkpoints import CheckpointError
from proxy.engine.node_policy import KUBELET_TRUE
from proxy.model.errors import TopoproxyError
from proxy.model.idset import CpuSet
from proxy.model.phrases import counted
from proxy.model.phrases import cpus as named_cpus
from proxy.takeover.inputs import STRICT_CPU_RESERVATION, NotAppliedToAll, OwningContainer, TakeoverInputs
from proxy.takeover.kubelet_start import is_unread, static_options
from proxy.takeover.record import Pending, TakeoverRecord, TakeoverStage

TARGETS = ("none", "static")

NOT_APPLIED = {
    NotAppliedToAll.OBSERVE: "the mode is observe: nothing would be placed (mode: enforce)",
    NotAppliedToAll.SELECTION: (
        "mode enforce selects only a part of the pods: the others would not be placed (the section enforce of"
        " the configuration)"
    ),
    NotAppliedToAll.LAGGING: "running pods are still to be changed (topoproxy enforce status)",
    NotAppliedToAll.RELEASED: "the node is released: nothing would be placed (topoproxy release --undo)",
}

Entries = dict[str, dict[str, CpuSet]]
"""Pod uid to container name to CPUs."""


@dataclass(frozen=True, slots=True)
class KubeletStateText:
    """A text for kubelet's file.

    Attributes:
        text: The text.
        omitted: Containers that the file cannot express, one sentence each.
    """

    text: str
    omitted: tuple[str, ...] = ()


def kubelet_state_text(record: TakeoverRecord, inputs: TakeoverInputs, target: str) -> KubeletStateText:
    """Write kubelet's file for a policy.

    Args:
        record: How far the takeover has come.
        inputs: The inputs of the takeover.
        target: ``none`` or ``static``.

    Raises:
        CheckpointError: kubelet would not start with any file that could be written.
    """
    version = inputs.file.version or CURRENT_VERSION
    if target == "none":
        return KubeletStateText(none_state(version))
    if version == 1:
        raise CheckpointError("cannot write kubelet's file: a kubelet before 1.18 wrote it (version 1)")
    reserved = (record.reserved | inputs.manager.reserved) & inputs.online
    held, left_out = _actual_cpus(inputs, reserved)
    _add_unknown(inputs, held, reserved)
    pods = _cpus_of_pods(inputs, held, reserved) if version > CURRENT_VERSION else {}
    strict = static_options(record, inputs).get(STRICT_CPU_RESERVATION) in KUBELET_TRUE
    text = static_state(inputs.online, held, pods=pods, reserved=reserved, strict=strict, version=version)
    return KubeletStateText(text, tuple(left_out))


def _actual_cpus(inputs: TakeoverInputs, reserved: CpuSet) -> tuple[Entries, list[str]]:
    """Return the CPUs that containers really have, and those that the file cannot express."""
    held: Entries = {}
    left_out: list[str] = []
    for owner in inputs.owning:
        cpus = owner.cpus & inputs.online
        if not cpus or cpus & reserved:
            why = f"CPUs {cpus & reserved} are reserved by kubelet" if cpus else "none of them is online"
            left_out.append(f"{owner.ref} has CPUs {owner.cpus}: {why}")
        else:
            held.setdefault(owner.uid, {})[owner.name] = cpus
    return held, left_out


def _add_unknown(inputs: TakeoverInputs, held: Entries, reserved: CpuSet) -> None:
    """Add the CPUs that kubelet holds for unknown containers, unless they overlap with CPUs of other pods."""
    owned: dict[str, CpuSet] = {}
    taken = CpuSet()
    for owner in inputs.owning:
        owned[owner.uid] = owned.get(owner.uid, CpuSet()) | owner.cpus
        taken |= owner.cpus
    spare = inputs.online - taken - reserved
    for uid, names in (inputs.file.held.held if inputs.file.held is not None else {}).items():
        others = taken - owned.get(uid, CpuSet()) | reserved
        for name, cpus in names.items():
            apart = cpus and cpus <= inputs.online and not cpus & others
            if apart and (uid, name) not in inputs.owned and spare - cpus:
                held.setdefault(uid, {})[name] = cpus
                spare -= cpus


def _cpus_of_pods(inputs: TakeoverInputs, held: Entries, reserved: CpuSet) -> dict[str, CpuSet]:
    """Keep the CPUs of whole pods as they are, if only the pod's own containers use them."""
    assert inputs.file.checkpoint is not None
    cpus_by_pod: dict[str, CpuSet] = {}
    for uid, cpus in pod_level_cpus(inputs.file.checkpoint).items():
        inside = all(container_cpus <= cpus for container_cpus in held.get(uid, {}).values())
        others = [
            container_cpus for key, names in held.items() if key != uid for container_cpus in names.values()
        ]
        apart = all(
            container_cpus.isdisjoint(cpus) for container_cpus in (*others, *cpus_by_pod.values(), reserved)
        )
        if uid in inputs.pods and inside and apart and cpus and cpus <= inputs.online:
            cpus_by_pod[uid] = cpus
    return cpus_by_pod


class StepRefusedError(TopoproxyError):
    """A step cannot be taken in the present state; nothing has changed.

    Attributes:
        hints: What to do about it, one sentence each.
    """

    def __init__(self, message: str, hints: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.hints = hints


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step.

    Attributes:
        record: The record after the step; if it has a pending write, the write must be made.
        reported: What happened, one sentence each.
    """

    record: TakeoverRecord
    reported: tuple[str, ...]


def conflicts(inputs: TakeoverInputs) -> tuple[str, ...]:
    """Return why a takeover cannot start; empty if it can."""
    return tuple(_conflicts(inputs))


def _conflicts(inputs: TakeoverInputs) -> Iterator[str]:
    if inputs.not_applied is not None:
        yield NOT_APPLIED[inputs.not_applied]
    if not inputs.ready:
        yield "the daemon has not compared its state with the runtime yet (topoproxy status has the reason)"
    file = inputs.file
    if file.held is None:
        yield f"kubelet's state file {inputs.directory}/cpu_manager_state cannot be used: {file.problem}"
        return
    if file.policy != "static":
        yield (
            f"kubelet's CPU manager policy is {file.policy or 'unknown'}: it holds no CPUs, so there is"
            " nothing to take over (cpuManagerPolicy: static in the configuration of topoproxy is all that is"
            " needed)"
        )
        return
    if file.version == 1:
        yield "kubelet's state file names containers by their ids (version 1, before kubelet 1.18)"
        return
    yield from _cpuset_conflicts(inputs)


def _cpuset_conflicts(inputs: TakeoverInputs) -> Iterator[str]:
    assert inputs.file.held is not None
    held = [(uid, n, cpus) for uid, pod in inputs.file.held.held.items() for n, cpus in pod.items()]
    everything = CpuSet()
    for uid, name, cpus in held:
        ref = inputs.ref(uid, name)
        if missing := cpus - inputs.online:
            yield f"CPUs {missing} that kubelet gave to {ref} are not online"
        if both := cpus & inputs.file.held.default:
            yield f"CPUs {both} that kubelet gave to {ref} are in its default set too"
        for other, other_name, other_cpus in held:
            if uid < other and cpus & other_cpus:
                yield f"kubelet gave CPUs {cpus & other_cpus} to {ref} and to {inputs.ref(other, other_name)}"
        if uid not in inputs.decided_elsewhere:
            for owner in inputs.owning:
                if owner.uid != uid and owner.cpus & cpus:
                    yield f"{owner.ref} owns {named_cpus(owner.cpus & cpus)} that kubelet gave to {ref}"
        everything |= cpus
    if inputs.shareable <= everything:
        yield "kubelet has assigned all CPUs: the shared pool would be empty"


def remaining_allocations(record: TakeoverRecord, inputs: TakeoverInputs) -> tuple[OwningContainer, ...]:
    """List the allocations of the start whose pod still exists."""
    remaining = []
    for uid, names in record.old.items():
        for name, cpus in names.items():
            if uid in inputs.pods:
                owned = inputs.owned.get((uid, name))
                remaining.append(owned or OwningContainer(uid, name, inputs.ref(uid, name), cpus))
    return tuple(sorted(remaining, key=lambda allocation: allocation.ref))


def start(record: TakeoverRecord, inputs: TakeoverInputs, now: float) -> StepOutcome:
    """Choose the CPUs of new pods from now on.

    Raises:
        StepRefusedError: The takeover cannot start.
    """
    if record.stage is not TakeoverStage.NONE:
        return StepOutcome(record, (f"nothing to do: the takeover is {record.stage.value} already",))
    if why := conflicts(inputs):
        hints = ("topoproxy takeover plan shows all that was found",)
        raise StepRefusedError(f"cannot start the takeover: {'; '.join(why)}", hints)
    held = inputs.file.held
    assert held is not None
    begun = TakeoverRecord(
        TakeoverStage.STARTED,
        now,
        now,
        inputs.file.policy,
        inputs.manager.reserved & inputs.online,
        inputs.manager.options.get(STRICT_CPU_RESERVATION) in KUBELET_TRUE,
        held.held,
        options=dict(inputs.manager.options),
    )
    count = sum(len(names) for names in held.held.values())
    return StepOutcome(
        begun,
        (
            f"{counted(count, 'allocation')} of kubelet's CPU manager: their containers keep these CPUs",
            "topoproxy chooses the CPUs of new pods; kubelet's choice is not in effect for them",
        ),
    )


def finish(
    record: TakeoverRecord, inputs: TakeoverInputs, target: str, *, with_running: bool, force: bool
) -> StepOutcome:
    """Write the CPUs in effect to kubelet's file, for the policy under which kubelet starts next.

    Raises:
        StepRefusedError: The takeover has not started, kubelet runs, or old allocations still exist.
        CheckpointError: kubelet would not start with any file that could be written.
    """
    if record.stage is TakeoverStage.NONE:
        raise StepRefusedError(
            "cannot finish the takeover: it has not started", ("topoproxy takeover start begins it",)
        )
    if record.stage is TakeoverStage.FINISHED and record.target == inputs.file.policy == target:
        return StepOutcome(record, (f"nothing to do: kubelet's file is that of policy {target} already",))
    remaining = remaining_allocations(record, inputs)
    if record.stage is TakeoverStage.STARTED and remaining and not with_running:
        raise StepRefusedError(
            f"cannot finish the takeover: {len(remaining)} of kubelet's allocations are still in use"
            f" ({', '.join(each.ref for each in remaining[:5])}{', ...' if len(remaining) > 5 else ''})",
            (
                "wait until their pods have ended (topoproxy takeover status)",
                "or finish --with-running: they keep their CPUs, which the ledger of topoproxy records",
            ),
        )
    _require_writable(inputs, "finish the takeover", force=force)
    made = kubelet_state_text(record, inputs, target)
    pending = Pending("finish", inputs.file.text, made.text, target)
    return StepOutcome(
        dataclasses.replace(
            record,
            pending=pending,
            forced=bool(inputs.running),
            forced_signs=inputs.running,
            options={**record.options, **inputs.manager.options},
        ),
        (f"kubelet's file is now that of policy {target}", *_reported(made.omitted)),
    )


def revert(record: TakeoverRecord, inputs: TakeoverInputs, *, force: bool) -> StepOutcome:
    """Let kubelet's CPU manager decide again, starting from the CPUs in effect now.

    Raises:
        StepRefusedError: Its file must be written, and kubelet runs.
        CheckpointError: kubelet would not start with any file that could be written.
    """
    if record.stage is TakeoverStage.NONE:
        return StepOutcome(record, ("nothing to do: there is no takeover",))
    made = kubelet_state_text(record, inputs, "static")
    # The state in kubelet's memory counts: it equals the file, unless we wrote the file while kubelet ran.
    if made.text == inputs.file.text and not is_unread(record, inputs):
        return StepOutcome(
            TakeoverRecord(), ("kubelet's file is right as it is; kubelet's CPU manager decides again",)
        )
    _require_writable(inputs, "revert the takeover", force=force)
    pending = Pending("revert", inputs.file.text, made.text, "static")
    return StepOutcome(
        dataclasses.replace(record, pending=pending),
        (
            "kubelet's file is that of policy static, with the CPUs that are in effect now",
            *_reported(made.omitted),
        ),
    )


def _require_writable(inputs: TakeoverInputs, what: str, *, force: bool) -> None:
    if not inputs.ready:
        raise StepRefusedError(
            f"cannot {what}: the daemon has not compared its state with the runtime yet",
            ("repeat this shortly; topoproxy status has the reason if it stays so",),
        )
    if inputs.unwritable:
        raise StepRefusedError(
            f"cannot {what}: {inputs.unwritable}",
            (f"let the daemon write there: ReadWritePaths={inputs.directory} in a drop-in of its unit",),
        )
    if inputs.running and not force:
        raise StepRefusedError(
            f"cannot {what}: kubelet runs ({'; '.join(inputs.running)}),"
            " and would write its file from memory",
            (
                "systemctl stop kubelet, repeat this, and start kubelet again; containers go on running",
                "--force writes nevertheless",
            ),
        )


def _reported(left_out: tuple[str, ...]) -> tuple[str, ...]:
    message = "not in kubelet's file, which cannot express it (the container keeps its CPUs)"
    return tuple(f"{message}: {container}" for container in left_out)
