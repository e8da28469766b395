"""A container's CPUs and memory nodes as environment variables, and in a file that is kept up to date.

The environment and the file contain::

    EXCLUSIVE_CPUS=2-5        CPUs that no other container runs on; empty if it owns none
    SHARED_CPUS=              the other CPUs that it may run on
    MEMORY_NODES=0            its memory nodes; empty: any

and with ``peers``, for each other container of the pod, ``PEER_CPUS_`` and its name (in capitals, everything
but letters and digits is ``_``): the CPUs that it may run on.

The environment shows the CPUs at the create. CPUs can change while a container runs (the shared pool shrinks
and grows). Then the file is updated: ``/run/topoproxy/cpus`` in the container, in a directory that is mounted
read-only. The file is replaced as a whole, so no process reads half of it; watch the directory, not the file.
Its lines are for a shell::

    . /run/topoproxy/cpus; exec taskset --cpu-list "$EXCLUSIVE_CPUS" program

The file is exact after each create, start and update of the container. Between these events, the file of a
container that shares a pool shows the pool. The file of a container that was narrowed to a part of its pool
shows that part without the CPUs that got an owner. CPUs that other hooks narrow are in the file, but not in
the environment. Variables that the container sets itself, and its own mounts at that path, stay unchanged.

The files are below ``root``, in one directory for each container, on a file system that the runtime also
sees. They are removed with the container. The files of containers whose creation failed are removed with a
sandbox of their pod, or at the next start of the daemon, if they are two minutes old. With SELinux the
directory needs a label that containers may read:
``semanage fcontext -a -t container_file_t '/run/topoproxy/hooks/cpus(/.*)?'``.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from proxy.hooks.api import (
    Adjustment,
    Configure,
    CpuSet,
    Decision,
    Mask,
    Mount,
    PodFacts,
    PoolsChanged,
    PostCreateContainer,
    PostRemoveContainer,
    PostRemovePodSandbox,
    PostStartContainer,
    PostStopContainer,
    PostUpdateContainerResources,
    PreCreateContainer,
    Synchronize,
)
from proxy.hooks.kit.container_tracker import ContainerTracker, Member

API_VERSION = 1
TIMEOUT = 2.0

FILE = "cpus"
GRACE_S = 120.0
"""A directory without a container is kept for this time: its create may be in progress."""
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")
_writing = threading.Lock()


@dataclass(frozen=True)
class Settings:
    """The containers that get a file, its directory, and the names in it."""

    which: Literal["owners", "annotated", "all"] = field(
        default="owners",
        metadata={"help": "Containers that own CPUs, those of pods with the annotation, or all."},
    )
    annotation: str = field(
        default="topoproxy.io/cpus-file=true",
        metadata={"help": "For annotated: the pod's annotation, key=value, or a key with any value."},
    )
    exclusive: str = field(default="EXCLUSIVE_CPUS", metadata={"help": "Name of the variable; empty: none."})
    shared: str = field(default="SHARED_CPUS", metadata={"help": "Name of the variable; empty: none."})
    memory: str = field(default="MEMORY_NODES", metadata={"help": "Name of the variable; empty: none."})
    peers: bool = field(default=False, metadata={"help": "Write the CPUs of the pod's other containers."})
    peer_prefix: str = field(default="PEER_CPUS_", metadata={"help": "What a peer's variable begins with."})
    env: bool = field(default=True, metadata={"help": "Write them to the environment."})
    mount: str = field(
        default="/run/topoproxy",
        metadata={"help": "Directory in the container that has the file; empty: no file."},
    )
    root: str = field(
        default="/run/topoproxy/hooks/cpus", metadata={"help": "Where the files are on the node."}
    )

    def __post_init__(self) -> None:
        """Check names and paths."""
        for name in (self.exclusive, self.shared, self.memory, self.peer_prefix):
            if not re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)?", name):
                raise ValueError(f"{name!r} cannot be the name of a variable")
        for path in (self.mount, self.root):
            if path and (not path.startswith("/") or ".." in path.split("/") or not path.strip("/")):
                raise ValueError(f"{path!r} is no absolute path of a directory")
        if not self.root:
            raise ValueError("root must be set")


_settings = Settings()
_containers = ContainerTracker()


def configure(event: Configure) -> None:
    """Take the settings."""
    global _settings
    _settings = event.settings


def synchronize(event: Synchronize) -> None:
    """Write the files of all containers, and remove those of containers that are gone."""
    existing = _containers.handle(event)
    _write_all(existing)
    kept = {_directory(member.uid, member.name, member.attempt) for member in existing}
    _sweep(path for path in Path(_settings.root).glob("*/*") if path not in kept)


def pre_create_container(event: PreCreateContainer) -> Adjustment | None:
    """Add the variables and the directory with the file to the container."""
    pod, container, decision = event.pod, event.container, event.decision
    if not _chosen(pod, decision):
        return None
    place = _settings.mount
    peers = {
        member.name: member.cpus for member in _containers.of_pod(pod.uid) if member.name != container.name
    }
    lines = _lines(decision.own, decision.cpus, decision.mems, peers)
    envs = {name: value for name, value in lines.items() if name not in container.envs}
    mounts: dict[str, Mount] = {}
    directory = _directory(pod.uid, container.name, container.attempt)
    if directory is not None and place.rstrip("/") not in (
        m.container_path.rstrip("/") for m in container.mounts
    ):
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)  # whatever the process's umask
        with _writing:
            _write(directory, lines)
        mounts[place] = Mount(place, str(directory), readonly=True)
    return Adjustment(envs=envs if _settings.env else {}, mounts=mounts)


def post_create_container(event: PostCreateContainer) -> None:
    """Record the container's id, and update its peers."""
    _write_all(_containers.handle(event))


def post_start_container(event: PostStartContainer) -> None:
    """Write the CPUs that it has now: pools may have changed since the create."""
    _write_all(_containers.handle(event))


def post_update_container_resources(event: PostUpdateContainerResources) -> None:
    """Write the CPUs that it has now."""
    _write_all(_containers.handle(event))


def pools_changed(event: PoolsChanged) -> None:
    """Update all containers whose CPUs have changed."""
    _write_all(_containers.handle(event))


def post_stop_container(event: PostStopContainer) -> None:
    """Update its peers."""
    _write_all(_containers.handle(event))


def post_remove_container(event: PostRemoveContainer) -> None:
    """Remove the container's directory, and update its peers."""
    gone = _containers.handle(event)
    directory = _directory(event.pod.uid, event.container.name, event.container.attempt)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            directory.parent.rmdir()  # it was the last directory of its pod
    _write_all(gone)


def post_remove_pod_sandbox(event: PostRemovePodSandbox) -> None:
    """Remove the remaining directories of the pod: those of creates that failed.

    The pod may have a new sandbox, in which a container is being created.
    """
    if _PLAIN.fullmatch(event.pod.uid) and not _containers.of_pod(event.pod.uid):
        _sweep((Path(_settings.root) / event.pod.uid).glob("*"))


def _chosen(pod: PodFacts, decision: Decision) -> bool:
    if _settings.which == "owners":
        return bool(decision.own)
    if _settings.which == "all":
        return True
    key, equals, value = _settings.annotation.partition("=")
    return key in pod.annotations and (not equals or pod.annotations[key] == value)


def _directory(uid: str, name: str, attempt: int) -> Path | None:
    """Return a container's directory; None if its names are not valid for one, or no file is wanted."""
    directory_name = f"{name}.{attempt}"
    if not _settings.mount or not _PLAIN.fullmatch(uid) or not _PLAIN.fullmatch(directory_name):
        return None
    return Path(_settings.root) / uid / directory_name


def _lines(own: CpuSet, cpus: CpuSet, mems: Mask | None, peers: Mapping[str, CpuSet]) -> dict[str, str]:
    lines = {
        _settings.exclusive: str(own),
        _settings.shared: str(cpus - own),
        _settings.memory: str(mems or ""),
    }
    if _settings.peers:
        for name, peer_cpus in sorted(peers.items()):
            lines[_settings.peer_prefix + re.sub("[^A-Z0-9]", "_", name.upper())] = str(peer_cpus)
    return {name: value for name, value in lines.items() if name}


def _write_all(changed: Iterable[Member]) -> None:
    """Write the files of these containers, and of their peers if these show them."""
    keys = {(member.uid, member.name, member.attempt) for member in changed}
    for uid in {uid for uid, _, _ in keys}:
        with _writing:  # the file that is written last has the newest facts
            pod = _containers.of_pod(uid)
            for member in pod:
                directory = _directory(member.uid, member.name, member.attempt)
                is_changed = (member.uid, member.name, member.attempt) in keys
                if (
                    directory is None
                    or not (is_changed or _settings.peers)
                    or not (directory / FILE).exists()
                ):
                    continue
                peers = {peer.name: peer.cpus for peer in pod if peer.name != member.name}
                with contextlib.suppress(FileNotFoundError):  # the container has just been removed
                    _write(directory, _lines(member.own, member.cpus, member.mems, peers))


def _write(directory: Path, lines: Mapping[str, str]) -> None:
    """Replace the file as a whole; no link at its path is followed."""
    text = "".join(f"{name}={value}\n" for name, value in lines.items())
    draft = directory / f".{FILE}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, flags, 0o644), "w") as stream:
        os.fchmod(stream.fileno(), 0o644)
        stream.write(text)
    draft.replace(directory / FILE)


def _sweep(directories: Iterable[Path]) -> None:
    """Remove directories that no container uses, unless a create that is in progress may use them."""
    before = time.time() - GRACE_S
    for directory in directories:
        with contextlib.suppress(OSError):
            if directory.lstat().st_mtime < before:
                shutil.rmtree(directory, ignore_errors=True)
                directory.parent.rmdir()
