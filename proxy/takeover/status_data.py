"""A takeover as plain data: what ``topoproxy takeover plan`` and ``status`` show."""

from __future__ import annotations

from proxy.model import schema_ids
from proxy.model.idset import CpuSet
from proxy.takeover.inputs import TakeoverInputs
from proxy.takeover.kubelet_start import is_unread, kubelet_settings, runs_under_other_policy
from proxy.takeover.record import TakeoverRecord, TakeoverStage
from proxy.takeover.rules import conflicts, remaining_allocations

WAIT_STEP = (
    "wait for the pods of the old allocations to end (topoproxy takeover status names them),"
    " or finish --with-running"
)
STEP_EFFECTS = {
    "start": (
        "containers keep the CPUs that kubelet's CPU manager assigned to them until they end",
        (
            "new pods get CPUs that topoproxy chooses, whichever kubelet names;"
            " kubelet's updates are answered with the CPUs that the container has"
        ),
        "nothing is written to kubelet's files, and no container moves",
    ),
    "finish": (
        "writes kubelet's cpu_manager_state for the policy that it starts with next (--kubelet-policy)",
        "needs kubelet stopped meanwhile: systemctl stop kubelet; containers go on running",
        "needs the old allocations to have ended, or --with-running: their containers keep their CPUs",
    ),
    "revert": (
        "writes kubelet's cpu_manager_state for policy static with the CPUs that are in effect then",
        "kubelet's CPU manager decides again; no container moves",
    ),
}


def plan_page(record: TakeoverRecord, inputs: TakeoverInputs) -> dict[str, object]:
    """Return the findings, and the effect of each step."""
    against = conflicts(inputs) if record.stage is TakeoverStage.NONE else ()
    ahead = {
        TakeoverStage.NONE: ("start", "finish", "revert"),
        TakeoverStage.STARTED: ("finish", "revert"),
        TakeoverStage.FINISHED: ("revert",),
    }[record.stage]
    return {
        "schema": schema_ids.TAKEOVER_PLAN,
        **head(record, inputs),
        "allocations": allocations(record, inputs),
        "conflicts": list(against),
        "notes": notes(record, inputs),
        "can_start": record.stage is TakeoverStage.NONE and not against,
        "steps": [{"step": step, "does": list(STEP_EFFECTS[step])} for step in ahead],
        "kubelet_settings": {
            target: list(kubelet_settings(record, inputs, target)) for target in ("none", "static")
        },
        "next": next_steps(record, inputs),
    }


def status_page(record: TakeoverRecord, inputs: TakeoverInputs) -> dict[str, object]:
    """Return how far the takeover has come and what remains."""
    remaining = remaining_allocations(record, inputs)
    against = conflicts(inputs) if record.stage is TakeoverStage.NONE else ()
    return {
        "schema": schema_ids.TAKEOVER_STATUS,
        **head(record, inputs),
        "conflicts": list(against),
        "old": sum(len(names) for names in record.old.values()),
        "left": [
            {"container": allocation.ref, "pod_uid": allocation.uid, "cpus": str(allocation.cpus)}
            for allocation in remaining
        ],
        "notes": notes(record, inputs),
        "next": next_steps(record, inputs),
    }


def head(record: TakeoverRecord, inputs: TakeoverInputs) -> dict[str, object]:
    """Return the common beginning of both pages, with the stage."""
    file, manager = inputs.file, inputs.manager
    return {
        "stage": record.stage.value,
        "began": record.began,
        "since": record.since,
        "target": record.target,
        "kubelet": {
            "policy": manager.policy or file.policy,
            "options": dict(manager.options),
            "reserved": str(manager.reserved or record.reserved),
            "memory_policy": inputs.memory_policy,
            "file": f"{inputs.directory}/cpu_manager_state",
            "file_policy": file.policy,
            "file_version": file.version,
            "file_problem": file.problem,
            "default": str(file.held.default) if file.held is not None else "",
            "running": list(inputs.running),
            "sources": dict(manager.sources),
        },
        "ours": {
            "cpuManagerPolicy": "static" if record.chooses_cpus or inputs.configured == "static" else "none",
            "configured": inputs.configured,
        },
    }


def allocations(record: TakeoverRecord, inputs: TakeoverInputs) -> list[dict[str, object]]:
    """List kubelet's entries and what we know of each."""
    rows: list[dict[str, object]] = []
    for uid, names in (inputs.file.held.held if inputs.file.held is not None else {}).items():
        for name, cpus in names.items():
            owned = inputs.owned.get((uid, name))
            in_effect = str(owned.cpus) if owned else ""
            state = "waits" if uid in inputs.pods else "gone"
            rows.append(
                {
                    "container": owned.ref if owned else inputs.ref(uid, name),
                    "pod_uid": uid,
                    "cpus": str(cpus),
                    "in_effect": in_effect,
                    "in_force": in_effect,  # the former name, for one release
                    "state": "runs" if owned else state,
                    "from_file": uid in inputs.static_pods,
                    "old": record.old.get(uid, {}).get(name, CpuSet()) == cpus or not record.chooses_cpus,
                }
            )
    return sorted(rows, key=lambda row: str(row["container"]))


def notes(record: TakeoverRecord, inputs: TakeoverInputs) -> list[str]:
    """Return notes for the operator that do not prevent a step."""
    problems = list(inputs.manager.problems)
    if record.chooses_cpus and inputs.configured != "static":
        problems.append(
            "topoproxy's configuration says cpuManagerPolicy: none, and the takeover makes it static:"
            " write static there, so that it stays so without the takeover's record"
        )
    if record.stage is TakeoverStage.FINISHED and inputs.file.policy != record.target:
        problems.append(
            f"finish wrote kubelet's file for policy {record.target}, and it is"
            f" {f'for {inputs.file.policy}' if inputs.file.policy else 'not usable'} now:"
            " another program wrote it (finish again, with kubelet stopped)"
        )
    problems += [
        f"{row['container']} runs on CPUs {row['in_effect']}, and kubelet's file says {row['cpus']}"
        for row in allocations(record, inputs)
        if row["in_effect"] not in ("", row["cpus"])
    ]
    if inputs.static_pods:
        names = sorted(inputs.pods.get(uid, uid) for uid in inputs.static_pods)
        problems.append(
            f"static pods keep their uid over kubelet's restart, and so their CPUs: {', '.join(names)}"
        )
    if inputs.memory_policy == "Static":
        problems.append(
            "kubelet's memory manager is Static: its file is left alone, and its policy must stay as it is"
        )
    if inputs.unwritable:
        problems.append(f"finish could not write kubelet's state file: {inputs.unwritable}")
    return problems


def after_revert(before: TakeoverRecord, inputs: TakeoverInputs, *, forced: bool) -> list[str]:
    """Return the remaining steps after the takeover has been reverted.

    Args:
        before: The record before the revert: it has kubelet's options, while the record after it is empty.
        inputs: The inputs of the takeover, after the revert.
        forced: kubelet ran while its file was written.
    """
    if inputs.running and not forced and not runs_under_other_policy(inputs, "static"):
        return []
    return _kubelet_start_steps(before, inputs, "static")


def _kubelet_start_steps(record: TakeoverRecord, inputs: TakeoverInputs, policy: str) -> list[str]:
    """Return the steps until kubelet runs with the file that was written."""
    start = "systemctl restart kubelet" if inputs.running else "systemctl start kubelet"
    return [*kubelet_settings(record, inputs, policy), start]


def next_steps(record: TakeoverRecord, inputs: TakeoverInputs) -> list[str]:
    """Return the remaining steps."""
    if record.stage is TakeoverStage.NONE:
        return ["topoproxy takeover start"] if not conflicts(inputs) else ["remove the obstacles"]
    if record.stage is TakeoverStage.STARTED:
        stop = ["systemctl stop kubelet"] if inputs.running else []
        wait = [WAIT_STEP] if remaining_allocations(record, inputs) else []
        return [
            *wait,
            *stop,
            "topoproxy takeover finish",
            *kubelet_settings(record, inputs, "none"),
            "systemctl start kubelet",
        ]
    if inputs.file.policy != record.target:
        return ["systemctl stop kubelet", f"topoproxy takeover finish --kubelet-policy {record.target}"]
    if not inputs.running or is_unread(record, inputs) or runs_under_other_policy(inputs, record.target):
        return _kubelet_start_steps(record, inputs, record.target)
    if inputs.configured == "static":
        return []
    return ["write cpuManagerPolicy: static into topoproxy's configuration"]
