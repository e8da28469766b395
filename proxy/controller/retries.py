"""Creates that came to nothing for us, and perhaps not for the runtime.

A runtime may finish a create whose client has gone and keep the container back, as CRI-O does
(``backends/runtime/quirks/crio``). The next request for the same pod, name and attempt is answered with that
container, which has the CPUs of the first request; by now these may have an owner. So after a create that
failed or lost its client, the next answer to the same request does not show what the runtime has saved. The
container does not run yet: it is sent today's set before its start, as any container whose set is old.
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
