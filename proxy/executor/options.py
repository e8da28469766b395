"""The options of an executor."""

from __future__ import annotations

from msgspec import Struct

from proxy.executor.runtime_ports import NO_QUIRKS, RuntimeQuirks
from proxy.model.mode import NodeMode
from proxy.model.pod_selection import ALL_PODS, PodSelection


class ExecutorOptions(Struct, frozen=True):
    """The options of the executor.

    Attributes:
        mode: The mode of the node at the start: enforce, or only observe.
        refuse_on_error: Refuse a create that could not be decided, instead of forwarding it unchanged.
        call_timeout: Seconds that one wait inside a held call may take.
        settle_per_second: How many moved containers a second have their cpusets sent to the runtime, so that
            they last; 0 for none.
        reconcile_period: Seconds between comparisons with the runtime and the kernel.
        history: How many decisions about removed containers and refusals are kept.
        quirks: How runtimes differ.
        selection: The pods that mode enforce selects at the start.
        pods_per_step, step_period: How many running pods are changed together where mode or selection change,
            and the seconds between the beginnings of two such steps.
    """

    mode: NodeMode = NodeMode.ENFORCE
    refuse_on_error: bool = False
    call_timeout: float = 5.0
    settle_per_second: float = 10.0
    reconcile_period: float = 10.0
    history: int = 500
    quirks: RuntimeQuirks = NO_QUIRKS
    selection: PodSelection = ALL_PODS
    pods_per_step: int = 1
    step_period: float = 1.0
