"""kubelet's next start: the settings that it needs for its state file, and whether it must be restarted.

kubelet reads its configuration and its state file when it starts, and refuses a file that does not fit the
policy and its options. So the file that the steps write and the settings that they request follow from the
same values.
"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.engine.node_policy import KUBELET_TRUE
from proxy.takeover.inputs import STRICT_CPU_RESERVATION, TakeoverInputs
from proxy.takeover.record import TakeoverRecord, options_text


def static_options(record: TakeoverRecord, inputs: TakeoverInputs) -> dict[str, str]:
    """Return kubelet's options for a start under ``static``: known ones override the recorded ones.

    Under ``none`` kubelet has no options, so only the record has its former options.
    """
    return {**record.known_options, **inputs.manager.options}


def kubelet_settings(record: TakeoverRecord, inputs: TakeoverInputs, target: str) -> tuple[str, ...]:
    """Return the settings that kubelet must start with, except those that it has already.

    Args:
        record: How far the takeover has come; it has the options of kubelet's former policy.
        inputs: The inputs of the takeover.
        target: The policy that kubelet starts with.
    """
    steps: list[str] = []
    if inputs.manager.policy != target or _is_by_state_file(inputs):
        steps.append(f"kubelet's configuration must say cpuManagerPolicy: {target} before kubelet starts")
    if target == "none":
        if inputs.manager.options:
            names = ", ".join(sorted(inputs.manager.options))
            steps.append(
                f"cpuManagerPolicyOptions ({names}) must be removed: under none kubelet refuses to start with"
                " any; the configuration of topoproxy has the same key"
            )
        if inputs.manager.reserved:
            steps.append(
                f"reservedSystemCPUs: {inputs.manager.reserved} may stay; set the same in the configuration"
                " of topoproxy"
            )
    elif lost := {
        name: value for name, value in record.known_options.items() if name not in inputs.manager.options
    }:
        steps.append(_to_be_set_again(lost))
    if inputs.manager.topology_policy not in ("", "none"):
        steps.append(
            f"topologyManagerPolicy: {inputs.manager.topology_policy} may stay"
            + (", but without CPU hints it decides by devices and memory alone" if target == "none" else "")
        )
    return tuple(steps)


def _to_be_set_again(lost: Mapping[str, str]) -> str:
    why = (
        f": without {STRICT_CPU_RESERVATION} it refuses its state file"
        if lost.get(STRICT_CPU_RESERVATION) in KUBELET_TRUE
        else ""
    )
    return f"cpuManagerPolicyOptions: {options_text(lost)} must be set again before kubelet starts{why}"


def is_unread(record: TakeoverRecord, inputs: TakeoverInputs) -> bool:
    """Return whether kubelet has not read what ``finish`` wrote: it ran at that time, and still runs."""
    if not record.forced or not inputs.running or inputs.file.text != record.written:
        return False
    then, now = _processes(record.forced_signs), _processes(inputs.running)
    return not then or not now or bool(then & now)


def _processes(signs: tuple[str, ...]) -> frozenset[str]:
    """Return the signs that name a process by its id: the id changes when kubelet restarts."""
    return frozenset(sign for sign in signs if sign.startswith("process "))


def runs_under_other_policy(inputs: TakeoverInputs, policy: str) -> bool:
    """Return whether kubelet is known to run under a different policy than the given one."""
    known = inputs.manager.policy if not _is_by_state_file(inputs) else ""
    return bool(inputs.running) and known not in ("", policy)


def _is_by_state_file(inputs: TakeoverInputs) -> bool:
    """Return whether kubelet's policy is known only from its state file, which the steps write."""
    return inputs.manager.sources.get("policy", "").endswith("cpu_manager_state")
