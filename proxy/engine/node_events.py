"""What happens to a node, as values: the input of ``proxy.engine.handle``.

Named tuples, as several are made for each container.
"""

from __future__ import annotations

from typing import NamedTuple

from proxy.model.idset import CpuSet


class SavedCpusLearned(NamedTuple):
    """It is known which CPUs the runtime has saved for a container, or not known any more.

    Attributes:
        container_id: The container; one that does not exist is passed over.
        cpus: The CPUs; None where they are not known.
    """

    container_id: str
    cpus: CpuSet | None


NodeEvent = SavedCpusLearned
