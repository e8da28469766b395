"""How a controller behaves."""

from __future__ import annotations

from msgspec import Struct

from proxy.controller.runtime_ports import NO_QUIRKS, RuntimeQuirks
from proxy.model.mode import NodeMode


class ControllerOptions(Struct, frozen=True):
    """How the controller behaves.

    Attributes:
        mode: The mode in which the node begins: to enforce, or only to observe.
        refuse_on_error: Refuse a create that we could not decide, instead of letting it pass as it came.
        call_timeout: Seconds that one wait inside a held call may take.
        settle_per_second: How many moved containers a second are made lasting at the runtime; 0 for none.
        reconcile_period: Seconds between comparisons with the runtime and the kernel.
        history: How many decisions about what is gone are remembered.
        quirks: How runtimes differ.
    """

    mode: NodeMode = NodeMode.ENFORCE
    refuse_on_error: bool = False
    call_timeout: float = 5.0
    settle_per_second: float = 10.0
    reconcile_period: float = 10.0
    history: int = 500
    quirks: RuntimeQuirks = NO_QUIRKS
