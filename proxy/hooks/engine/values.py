"""Validation of single values of an answer: numbers, texts, sets, paths. Pure.

Numbers follow the kernel: CFS period 1 ms to 1 s and quota from 1 ms (``kernel/sched/core.c``), shares 2 to
262144, ``oom_score_adj`` -1000 to 1000. In the CRI 0 means *not set*, so 0 is refused for fields in which it
is not a real value; ``CLEAR`` unsets a field.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any, Final

from proxy.hooks.facts import Device, Mount
from proxy.model.idset import CpuSet, Mask

LONGEST_KEY: Final = 4096
"""Characters of a key, a name or a path."""
LONGEST_VALUE: Final = 64 * 1024
"""Characters of one value."""
_INT64_MAX: Final = 2**63 - 1

NUMBER_BOUNDS: Final[dict[str, tuple[int, int]]] = {
    "cpu_period": (1_000, 1_000_000),
    "cpu_quota": (1_000, _INT64_MAX),
    "cpu_shares": (2, 262_144),
    "memory_limit": (1, _INT64_MAX),
    "memory_swap_limit": (1, _INT64_MAX),
    "oom_score_adj": (-1_000, 1_000),
}
"""Field to its least and greatest value."""
UNLIMITABLE_FIELDS: Final = frozenset(("cpu_quota", "memory_swap_limit"))
"""The fields in which -1 means no limit."""
KUBELET_KEY_PREFIXES: Final[Mapping[str, tuple[str, ...]]] = {
    "labels": ("io.kubernetes.",),
    "annotations": ("io.kubernetes.container.", "io.kubernetes.pod."),
}
"""Prefixes of keys that kubelet reads back from the runtime.

See kubernetes v1.36 pkg/kubelet/kuberuntime/labels.go. If one of their values changes, kubelet assigns the
container to another pod, or assumes that its pod has changed, and kills or restarts the container.
"""
_FILE = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")
_PROPAGATIONS: Final = ("private", "host_to_container", "bidirectional")


class InvalidFieldError(ValueError):
    """A value that is invalid; the message says why."""


def number(field: str, value: object) -> int:
    """Check a number.

    Raises:
        InvalidFieldError: It is not a number, or out of bounds.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidFieldError(f"it must be a whole number, not {type(value).__name__}")
    plain = int.__add__(value, 0)
    low, high = NUMBER_BOUNDS[field]
    if low <= plain <= high or (plain == -1 and field in UNLIMITABLE_FIELDS):
        return plain
    bounds = f"{low} to {high}" if high < _INT64_MAX else f"at least {low}"
    raise InvalidFieldError(
        f"it must be {bounds}" + (" or -1 for no limit" if field in UNLIMITABLE_FIELDS else "")
    )


def ids(kind: type[CpuSet] | type[Mask], value: Any, allowed: CpuSet | Mask | None) -> CpuSet | Mask:
    """Check CPUs or NUMA nodes: not empty, and a subset of the allowed ones (None: not known here).

    Raises:
        InvalidFieldError: The value is not such a set, or not a subset.
    """
    if type(value) is not kind or type(value.bits) is not int:
        raise InvalidFieldError(f"it must be a {kind.__name__}, not {type(value).__name__}")
    if not value:
        raise InvalidFieldError("it must not be empty")
    if allowed is not None and value.bits & ~allowed.bits:
        raise InvalidFieldError(f"a hook may choose from {str(allowed) or 'none'} there")
    plain: CpuSet | Mask = kind.from_bits(value.bits)
    return plain


def text(value: object, most: int = LONGEST_VALUE, loose: bool = False) -> str:
    """Check a text: no NUL, not too long, and UTF-8.

    Args:
        value: The text.
        most: Characters.
        loose: It may contain bytes that are not UTF-8, as lone surrogates (``surrogateescape``).

    Raises:
        InvalidFieldError: It is not a text, or cannot be sent.
    """
    if type(value) is not str:
        if not isinstance(value, str):
            raise InvalidFieldError(f"it must be a string, not {type(value).__name__}")
        value = str.__str__(value)
    if len(value) > most:
        raise InvalidFieldError(f"it has {len(value)} characters, {most} are allowed")
    if "\0" in value:
        raise InvalidFieldError("it has a NUL character")
    if not value.isascii():
        try:
            value.encode("utf-8", "surrogateescape" if loose else "strict")
        except UnicodeError:
            raise InvalidFieldError("it cannot be written as UTF-8") from None
    return value


def key(value: object) -> str:
    """Check a key of a map: a text that is not empty.

    Raises:
        InvalidFieldError: It is not a valid key.
    """
    if type(value) is str and 0 < len(value) <= LONGEST_KEY and value.isascii() and "\0" not in value:
        return value  # nearly all are such
    name = text(value, LONGEST_KEY)
    if not name:
        raise InvalidFieldError("the key must not be empty")
    return name


def variable(value: object) -> str:
    """Check the name of an environment variable.

    Raises:
        InvalidFieldError: It contains ``=``, or is not a valid key.
    """
    name = key(value)
    if "=" in name:
        raise InvalidFieldError("the name of a variable cannot have a '='")
    return name


def cgroup_file(value: object) -> str:
    """Check the name of a file of cgroup v2.

    Raises:
        InvalidFieldError: It is not a file name, or names a file that only the engine writes.
    """
    name = key(value)
    if not _FILE.fullmatch(name):
        raise InvalidFieldError("it must be the name of a file of cgroup v2 such as memory.high")
    if name.startswith(("cpuset.", "cgroup.")):
        raise InvalidFieldError(
            "files cpuset.* and cgroup.* are the engine's; CPUs and nodes are cpus and mems"
        )
    return name


def path(value: object) -> str:
    """Check an absolute path below the root; return it in the runtimes' spelling.

    ``/a/`` and ``/a`` are the same path, so two hooks that set them must conflict.

    Raises:
        InvalidFieldError: It is relative, the root itself, or goes up.
    """
    name = text(value, LONGEST_KEY)
    if ".." in name.split("/"):
        raise InvalidFieldError("the path must not have '..' in it")
    clean = "/" + posixpath.normpath(name).lstrip("/")
    if not name.startswith("/") or clean == "/":
        raise InvalidFieldError("the path must be absolute and not the root")
    return clean


def parent(value: object) -> str:
    """Check a cgroup's name, of either driver.

    Raises:
        InvalidFieldError: It is empty or goes up.
    """
    name = text(value, LONGEST_KEY)
    if not name.strip("/") or ".." in name.split("/"):
        raise InvalidFieldError("it must name a cgroup, without '..'")
    return name


def device(where: str, value: object) -> Device:
    """Check a device at its path in the container.

    Raises:
        InvalidFieldError: It is not valid.
    """
    if not isinstance(value, Device):
        raise InvalidFieldError(f"it must be a Device, not {type(value).__name__}")
    rights = text(value.permissions, 3)
    if not rights or set(rights) - set("rwm"):
        raise InvalidFieldError("permissions must be of r, w and m")
    return Device(_checked_container_path(where, value.container_path), path(value.host_path), rights)


def mount(where: str, value: object) -> Mount:
    """Check a mount at its path in the container.

    Raises:
        InvalidFieldError: It is not valid.
    """
    if not isinstance(value, Mount):
        raise InvalidFieldError(f"it must be a Mount, not {type(value).__name__}")
    if not isinstance(value.readonly, bool):
        raise InvalidFieldError("readonly must be True or False")
    if value.propagation not in _PROPAGATIONS:
        raise InvalidFieldError(f"propagation must be one of {', '.join(_PROPAGATIONS)}")
    where = _checked_container_path(where, value.container_path)
    return Mount(where, path(value.host_path), value.readonly, text(value.propagation))


def _checked_container_path(where: str, value: object) -> str:
    name = path(value)
    if name != where:
        raise InvalidFieldError(f"its container_path is {name[:100]!r}, the key must be the same")
    return name
