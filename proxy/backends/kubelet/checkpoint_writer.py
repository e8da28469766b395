"""Writing ``cpu_manager_state`` as kubelet's CPU manager does.

kubelet reads the file once, when it starts, and exits with an error if a check fails; a supervisor then
restarts it again and again (kubernetes v1.36 pkg/kubelet/cm/cpumanager/state/state_checkpoint.go,
restoreState, and pkg/kubelet/cm/cpumanager/policy_static.go, validateState). It checks:

- that the policy's name is that of its configuration, and that the checksum is correct;
- under ``none`` nothing else: the default set is empty and there are no entries;
- under ``static``: that the default set is not empty, that no entry overlaps it, that all entries and the
  default set together are the online CPUs, and that the CPUs that kubelet reserves are in the default set.
  With the option ``strict-cpu-reservation`` the reserved CPUs must be in neither the entries nor the default
  set, which together are the other online CPUs.

After that, kubelet writes the file from memory at each change and never reads it again. So a file that is
written while kubelet runs is lost with kubelet's next write. kubelet's memory manager keeps
``memory_manager_state`` in the same way, by its own policy. That file contains nothing of the CPU manager,
and is not changed when the CPU manager's policy changes.

A write is atomic, as in kubelet: a file next to the old one is written, synced and renamed over it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy.atomic_write import write_file
from proxy.backends.kubelet.checkpoints import (
    Checkpoint,
    CheckpointError,
    cpu_checksum_text,
    fnv1a,
    held_cpus,
    lower_case_keys,
    read_cpu_checkpoint,
)
from proxy.backends.kubelet.small_file import read_small_file
from proxy.model.errors import CannotCreateError, PermissionDeniedError
from proxy.model.idset import CpuSet
from proxy.model.kubelet import Held

CPU_STATE_FILE = "cpu_manager_state"
CURRENT_VERSION = 2
"""The version that kubelet has written since 1.18, unless the gate PodLevelResourceManagers is on."""
_DRAFT_NAME = f".{CPU_STATE_FILE}.topoproxy"
_FILE_LIMIT_BYTES = 16 << 20


def none_state(version: int = CURRENT_VERSION) -> str:
    """Return the text of the file for policy ``none``."""
    return _state("none", CpuSet(), {}, {}, version)


def static_state(
    all_cpus: CpuSet,
    held: Held,
    *,
    pods: Mapping[str, CpuSet] | None = None,
    reserved: CpuSet | None = None,
    strict: bool = False,
    version: int = CURRENT_VERSION,
) -> str:
    """Return the text of the file for policy ``static``, with the exclusive CPUs of some containers.

    Args:
        all_cpus: The CPUs that kubelet counts: the online CPUs.
        held: Pod uid to container name to CPUs; for version 1, container ids below an empty uid.
        pods: CPUs of pods as a whole, by uid; only version 3 supports them.
        reserved: CPUs that kubelet reserves.
        strict: kubelet's option ``strict-cpu-reservation`` is on.
        version: The file's version.

    Raises:
        CheckpointError: kubelet would not start with this file.
    """
    keep = reserved or CpuSet()
    whole = all_cpus - keep if strict else all_cpus
    taken = CpuSet()
    for cpus in [cpus for pod in held.values() for cpus in pod.values()] + list((pods or {}).values()):
        taken |= cpus
    for wrong, problem in (
        (taken - all_cpus, "are not online"),
        (taken & keep, "are reserved by kubelet"),
    ):
        if wrong:
            raise CheckpointError(
                f"cannot write kubelet's {CPU_STATE_FILE}: CPUs {wrong} of containers {problem}"
            )
    if not whole - taken:
        raise CheckpointError(f"cannot write kubelet's {CPU_STATE_FILE}: no CPU is left for its default set")
    return _state("static", whole - taken, held, pods or {}, version)


def _state(policy: str, default: CpuSet, held: Held, pods: Mapping[str, CpuSet], version: int) -> str:
    fields: dict[str, Any] = {"policyName": policy, "defaultCpuSet": str(default)}
    entries: dict[str, Any] = {
        uid: {name: str(cpus) for name, cpus in sorted(names.items())} for uid, names in sorted(held.items())
    }
    if version == 1:
        entries = entries.get("", {})
    if entries:
        fields["entries"] = entries
    if pods and version >= 3:
        fields["podEntries"] = {uid: {"cpuSet": str(cpus)} for uid, cpus in sorted(pods.items())}
    fields["checksum"] = cpu_checksum(fields, version)
    written = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
    _verify(written, policy, default, held, version)
    return written


def cpu_checksum(fields: Mapping[str, Any], version: int) -> int:
    """Return the checksum that kubelet computes for the fields of a file."""
    return fnv1a(cpu_checksum_text(lower_case_keys(fields), version))


def _verify(written: str, policy: str, default: CpuSet, held: Held, version: int) -> None:
    """Parse the text, and raise an error unless it reads back as intended; such a text is never written."""
    checkpoint = read_cpu_checkpoint(written)
    cpus = held_cpus(checkpoint)
    expected = {uid: dict(names) for uid, names in held.items() if names}
    got = {uid: dict(names) for uid, names in cpus.held.items()}
    if (checkpoint.policy, checkpoint.version, cpus.default, got) != (policy, version, default, expected):
        raise CheckpointError(
            f"cannot write kubelet's {CPU_STATE_FILE}: it does not read back as it was meant"
        )


def pod_level_cpus(checkpoint: Checkpoint) -> dict[str, CpuSet]:
    """Return the CPUs of pods as a whole from a file of version 3.

    Raises:
        CheckpointError: The file contains an invalid CPU list.
    """
    entries = checkpoint.fields.get("podentries") or {}
    try:
        return {uid: CpuSet.parse(lower_case_keys(pod).get("cpuset", "")) for uid, pod in entries.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"cannot read kubelet's {CPU_STATE_FILE}: {error!r}") from None


def read_cpu_state(directory: Path) -> str | None:
    """Read kubelet's file; None if there is none.

    Raises:
        CheckpointError: The file cannot be read.
    """
    try:
        raw, _ = read_small_file(str(directory / CPU_STATE_FILE), _FILE_LIMIT_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {directory / CPU_STATE_FILE}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"cannot read {directory / CPU_STATE_FILE}: {error}") from None
    return raw.decode(errors="replace")


def write_cpu_state(directory: Path, text: str) -> None:
    """Replace the content of kubelet's file, atomically, with mode 0600 and the same owner.

    Raises:
        CannotCreateError, PermissionDeniedError: The file cannot be written; the old file is unchanged.
    """
    replace_file(directory / CPU_STATE_FILE, text, directory / _DRAFT_NAME)


def remove_draft(directory: Path) -> None:
    """Remove temporary files of interrupted writes."""
    with contextlib.suppress(OSError):
        (directory / _DRAFT_NAME).unlink()


def replace_file(path: Path, text: str, draft: Path) -> None:
    """Replace a file by renaming a draft next to it; see ``write_cpu_state``."""
    try:
        write_file(path, text.encode(), draft=draft, keep_owner=True)
    except OSError as error:
        kind = PermissionDeniedError if isinstance(error, PermissionError) else CannotCreateError
        raise kind(f"cannot write {path}: {error.strerror or error}") from None
