"""Creates that came to nothing for us, and perhaps not for the runtime.

Theory (CRI-O 1.34, ``resourcestore``). A create whose client has gone is carried on with, and its container
kept back: no list shows it. Whoever asks for the same pod, name and attempt again is given that container,
made by the first request, with the CPUs of that one: others than today's perhaps, which may have an owner by
now. The container waits, so nobody is disturbed before its start. So after a create that failed, or lost its
client, the next answer to the same question says nothing of what the runtime has saved; then the container is
told today's set before it starts, as any whose set is old.
"""

from __future__ import annotations

from proxy.model.workload import Container

REMEMBERED = 256
"""So many are remembered; the oldest are forgotten first."""


class Retries:
    """Remembers creates that had no good end."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str, int], None] = {}

    def note(self, container: Container) -> None:
        """A create had no good end."""
        if len(self._open) >= REMEMBERED:
            del self._open[next(iter(self._open))]
        self._open[_key(container)] = None

    def settle(self, container: Container) -> bool:
        """A create had one; tell whether the container may be an earlier request's."""
        return self._open.pop(_key(container), 0) is None


def _key(container: Container) -> tuple[str, str, int]:
    return container.pod.sandbox_id, container.name, container.attempt
