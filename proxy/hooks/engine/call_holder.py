"""Which hook holds the call of a sequence, and the ticket to continue from there.

Theory. Only the thread that owns the *ticket* may continue a sequence. The ticket is a list with one item,
and the thread that pops the item owns it. The thread that calls a hook pops it when the hook has answered and
the answer is checked; the event loop pops it when the hook's deadline has passed. One of the two gets the
item; the other finds the list empty and discards its result. So a sequence needs no lock, and a late answer
cannot be used.
"""

from __future__ import annotations

from msgspec import Struct

from proxy.hooks.engine.invoke import HookTask
from proxy.hooks.engine.runners import Runner
from proxy.hooks.engine.slots import HookSlots


class CallHolder(Struct, frozen=True, eq=False):
    """The hook that a sequence is calling, and the ticket to continue from there.

    Attributes:
        ticket: Has one item; the thread that pops it continues the sequence.
        slots: The slots of the hook that is called; None while the sequence waits for a slot.
        runs_in: The runner or coroutine that the hook runs in.
        deadline: When the hook is overdue.
    """

    ticket: list[bool]
    slots: HookSlots | None
    runs_in: Runner | HookTask | None
    deadline: float

    def take_ticket(self) -> bool:
        """Take the ticket; return False if another thread has taken it."""
        try:
            self.ticket.pop()
        except IndexError:
            return False
        return True
