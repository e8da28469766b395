"""Reading the state files of kubelet's CPU and memory managers.

The format (kubernetes v1.36 pkg/kubelet/checkpointmanager/checksum/checksum.go, New; pkg/util/hash/hash.go,
DeepHashObject): the files are compact JSON with a checksum. The checksum is the 32-bit FNV-1a hash of a text,
which a Go printer (spew) prints for the structure with checksum 0. The text names Go types for fields, but
not for map keys, values and list items. It shows pointers in maps as ``<*>`` and null values as ``<nil>``
(the outermost maps are null only if the file says so; if they are left out, they are empty), sorts keys, and
puts one space between members. All versions have the same type name, and differ only in the types of the
entries:

- CPU version 1 has container id to set, version 2 pod uid to container name to set, and version 3 in addition
  a set for each pod;
- memory version 2 has in addition blocks for each pod.

A file does not contain its version: its version is the one whose text has the checksum. Reading never needs
the checksum: a file that is being rewritten, or was edited, has ``version`` None, and the caller decides.
Keys match regardless of case, as in Go.

The contents (kubernetes v1.36 pkg/kubelet/cm/cpumanager/policy_static.go, Allocate) are only hints for us,
and kubelet does not know when we read them: between two writes a CPU can be neither in the default set nor in
an entry. So the contents are converted without changes, and only an invalid set is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from proxy.model.errors import TopoproxyError
from proxy.model.idset import CpuSet
from proxy.pools.go_json import load

_OFFSET, _PRIME = 2166136261, 16777619
_NIL = "<nil>"


class HeldCpus(Struct, frozen=True):
    """The contents of ``cpu_manager_state``.

    Attributes:
        default: The shared set.
        held: Pod uid to container name to CPUs; version 1 has container ids below an empty uid.
    """

    default: CpuSet
    held: Mapping[str, Mapping[str, CpuSet]]


def held_cpus(checkpoint: Checkpoint) -> HeldCpus:
    """Read the CPUs of a ``cpu_manager_state``.

    Raises:
        CheckpointError: The file contains an invalid CPU list.
    """
    with _readable("cpu_manager_state"):
        entries = checkpoint.fields.get("entries") or {}
        if entries and all(isinstance(value, str) for value in entries.values()):
            entries = {"": entries}
        default = CpuSet.parse(checkpoint.fields.get("defaultcpuset", ""))
        held = {uid: {n: CpuSet.parse(text) for n, text in pod.items()} for uid, pod in entries.items()}
        return HeldCpus(default, held)


@contextmanager
def _readable(file: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"cannot read kubelet's {file}: {error!r}") from None


class CheckpointError(TopoproxyError):
    """A state file of kubelet cannot be understood."""


class Checkpoint(Struct, frozen=True):
    """The contents of a state file.

    Attributes:
        fields: The file's JSON; the keys of the outermost structure are in lower case.
        checksum: The checksum in the file; 0 if there is none.
        version: The version whose text has the checksum; None if no version's text has it.
        text: The text that was hashed for that version; empty if ``version`` is None.
    """

    fields: Mapping[str, Any]
    checksum: int
    version: int | None
    text: str

    @property
    def policy(self) -> str:
        """Name of the policy under which the file was written."""
        return str(self.fields.get("policyname", ""))


def fnv1a(text: str) -> int:
    """Return the 32-bit FNV-1a hash of a text in UTF-8."""
    value = _OFFSET
    for byte in text.encode():
        value = (value ^ byte) * _PRIME & 0xFFFFFFFF
    return value


def read_cpu_checkpoint(content: str) -> Checkpoint:
    """Read ``cpu_manager_state``.

    Raises:
        CheckpointError: The text is not that of such a file.
    """
    return _read(content, "cpu_manager_state", {2: _cpu_2, 1: _cpu_1, 3: _cpu_3})


def cpu_checksum_text(fields: Mapping[str, Any], version: int) -> str:
    """Return the text whose hash is the checksum of a ``cpu_manager_state``.

    Args:
        fields: The file's JSON, with the outermost keys in lower case.
        version: 1, 2 or 3.

    Raises:
        KeyError: There is no such version.
    """
    return {1: _cpu_1, 2: _cpu_2, 3: _cpu_3}[version](fields)


def read_memory_checkpoint(content: str) -> Checkpoint:
    """Read ``memory_manager_state``.

    Raises:
        CheckpointError: The text is not that of such a file.
    """
    return _read(content, "memory_manager_state", {1: _memory_1, 2: _memory_2})


def _read(content: str, file: str, texts: Mapping[int, Callable[[Mapping[str, Any]], str]]) -> Checkpoint:
    try:
        raw = load(content, largest=None)
        if not isinstance(raw, dict):
            raise ValueError("it is not a JSON object")  # noqa: TRY004, TRY301 - one kind of error for all
        fields = lower_case_keys(raw)
        checksum = _checksum(fields.get("checksum"))
    except ValueError as error:
        raise CheckpointError(f"cannot read kubelet's {file}: {error}") from None
    for version, text in texts.items():
        try:
            # Go has no lone surrogates: it reads each as the replacement character.
            shown = text(fields).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError):
            continue  # the entries have another form, so the file is not of this version
        if fnv1a(shown) == checksum:
            return Checkpoint(fields, checksum, version, shown)
    return Checkpoint(fields, checksum, None, "")


def _checksum(raw: object) -> int:
    try:
        return int(raw or 0)  # type: ignore[call-overload, no-any-return]
    except (ValueError, TypeError, ArithmeticError):
        raise ValueError("its checksum is not a number") from None


def lower_case_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a structure with its keys in lower case."""
    return {name.lower(): value for name, value in raw.items()}


def _map(items: Iterable[tuple[object, str]]) -> str:
    return f"map[{' '.join(f'{key}:{value}' for key, value in items)}]"


def _strings(raw: Mapping[str, Any] | None) -> str:
    if raw is None:
        return _NIL
    items = sorted(raw.items())
    if not all(isinstance(value, str) for _, value in items):
        raise TypeError("not a map of strings")
    return _map(items)


def _nested(raw: Mapping[str, Any] | None, show: Callable[[Any], str]) -> str:
    return _NIL if raw is None else _map((key, show(value)) for key, value in sorted(raw.items()))


def _struct(name: str, *members: str) -> str:
    return f"(*state.{name}){{{' '.join(members)} Checksum:(checksum.Checksum)0}}"


def _cpu(fields: Mapping[str, Any], *members: str) -> str:
    head = (
        f"PolicyName:(string){fields.get('policyname', '')}",
        f"DefaultCPUSet:(string){fields.get('defaultcpuset', '')}",
    )
    return _struct("CPUManagerCheckpoint", *head, *members)


def _cpu_1(fields: Mapping[str, Any]) -> str:
    return _cpu(fields, f"Entries:(map[string]string){_strings(fields.get('entries', {}))}")


def _cpu_2_entries(fields: Mapping[str, Any]) -> str:
    return f"Entries:(map[string]map[string]string){_nested(fields.get('entries', {}), _strings)}"


def _cpu_2(fields: Mapping[str, Any]) -> str:
    return _cpu(fields, _cpu_2_entries(fields))


def _cpu_3(fields: Mapping[str, Any]) -> str:
    remaining = CpuSet.LIMIT

    def pod_cpus(raw: Mapping[str, Any]) -> str:
        nonlocal remaining
        cpus = CpuSet.parse(lower_case_keys(raw).get("cpuset", ""))
        remaining -= len(cpus)
        if remaining < 0:  # a short text can name very many CPUs; the sets of pods never overlap
            raise ValueError("more CPUs than any machine has")
        elements = _map((cpu, "{}") for cpu in cpus)
        return f"{{CPUSet:(cpuset.CPUSet){{elems:(map[int]struct {{}}){elements}}}}}"

    pods = _nested(fields.get("podentries", {}), pod_cpus)
    return _cpu(fields, _cpu_2_entries(fields), f"PodEntries:(state.PodCPUAssignments){pods}")


def _memory(fields: Mapping[str, Any], *members: str) -> str:
    nodes = fields.get("machinestate", {})
    if nodes is not None:
        nodes = {int(i): node for i, node in nodes.items()}
    entries = _nested(fields.get("entries", {}), lambda pod: _nested(pod, _blocks))
    return _struct(
        "MemoryManagerCheckpoint",
        f"PolicyName:(string){fields.get('policyname', '')}",
        f"MachineState:(state.NUMANodeMap){_nested(nodes, _node)}",
        f"Entries:(state.ContainerMemoryAssignments){entries}",
        *members,
    )


def _memory_1(fields: Mapping[str, Any]) -> str:
    return _memory(fields)


def _memory_2(fields: Mapping[str, Any]) -> str:
    def pod(raw: Mapping[str, Any]) -> str:
        return f"{{MemoryBlocks:([]state.Block){_blocks(lower_case_keys(raw).get('memoryblocks'))}}}"

    pods = _nested(fields.get("podentries", {}), pod)
    return _memory(fields, f"PodEntries:(state.PodMemoryAssignments){pods}")


def _node(raw: Mapping[str, Any]) -> str:
    node = lower_case_keys(raw)
    tables = _nested(node.get("memorymap"), _table)
    return (
        f"<*>{{NumberOfAssignments:(int){int(node.get('numberofassignments', 0))}"
        f" MemoryMap:(map[v1.ResourceName]*state.MemoryTable){tables}"
        f" Cells:([]int){_list(node.get('cells'))}}}"
    )


_AMOUNTS = {
    "TotalMemSize": "total",
    "SystemReserved": "systemreserved",
    "Allocatable": "allocatable",
    "Reserved": "reserved",
    "Free": "free",
}


def _table(raw: Mapping[str, Any]) -> str:
    table = lower_case_keys(raw)
    return f"<*>{{{' '.join(f'{go}:(uint64){int(table.get(key, 0))}' for go, key in _AMOUNTS.items())}}}"


def _list(raw: Iterable[object] | None) -> str:
    return _NIL if raw is None else f"[{' '.join(map(str, raw))}]"


def _blocks(raw: Iterable[Mapping[str, Any]] | None) -> str:
    return _list(None if raw is None else [_block(lower_case_keys(block)) for block in raw])


def _block(block: Mapping[str, Any]) -> str:
    return (
        f"{{NUMAAffinity:([]int){_list(block.get('numaaffinity'))}"
        f" Type:(v1.ResourceName){block.get('type', '')} Size:(uint64){int(block.get('size', 0))}}}"
    )
