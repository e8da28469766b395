"""The contents of kubelet's state files: which containers hold which CPUs.

Theory (kubernetes v1.36 pkg/kubelet/cm/cpumanager/policy_static.go, Allocate). The files are hints for us,
and kubelet does not know when we read them: between two writes a set may be in neither place. So the contents
are converted as they are, and only an invalid set is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from msgspec import Struct

from proxy.backends.kubelet.checkpoints import Checkpoint, CheckpointError
from proxy.model.idset import CpuSet


class HeldCpus(Struct, frozen=True):
    """What ``cpu_manager_state`` says.

    Attributes:
        default: The shared set.
        held: Pod uid to container name to CPUs; version 1 has container ids, and the empty uid here.
    """

    default: CpuSet
    held: Mapping[str, Mapping[str, CpuSet]]


def held_cpus(checkpoint: Checkpoint) -> HeldCpus:
    """Read the CPUs of a ``cpu_manager_state``.

    Raises:
        CheckpointError: It holds an invalid CPU list.
    """
    with _readable("cpu_manager_state"):
        entries = checkpoint.fields.get("entries") or {}
        if entries and all(isinstance(value, str) for value in entries.values()):
            entries = {"": entries}
        default = CpuSet.parse(checkpoint.fields.get("defaultcpuset", ""))
        held = {uid: {n: CpuSet.parse(text) for n, text in pod.items()} for uid, pod in entries.items()}
        return HeldCpus(default, held)


@contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"cannot read kubelet's {what}: {error!r}") from None
