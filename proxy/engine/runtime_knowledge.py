"""What is known of the runtime beside its containers, as a value."""

from __future__ import annotations

from typing import NamedTuple

from proxy.model.idset import CpuSet
from proxy.model.persistent_map import PersistentMap


class RuntimeKnowledge(NamedTuple):
    """What is known of the runtime. A named tuple, as two are made for each container.

    Attributes:
        saved: By container id, the CPUs that the runtime uses when it next starts or updates the container.
            A container whose value is not known is not in it.
    """

    saved: PersistentMap[CpuSet] = PersistentMap()

    def saving(self, container_id: str, cpus: CpuSet | None) -> RuntimeKnowledge:
        """Return it with what the runtime has saved for a container; None where that is not known."""
        saved = self.saved.drop(container_id) if cpus is None else self.saved.put(container_id, cpus)
        return self if saved is self.saved else self._replace(saved=saved)
