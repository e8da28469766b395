"""What single values of an answer may be: numbers, texts, sets, paths. Pure.

Numbers follow the kernel: CFS period 1 ms to 1 s and quota from 1 ms (``kernel/sched/core.c``), shares 2 to
262144, ``oom_score_adj`` -1000 to 1000. What the CRI writes as 0 means *not said* there, so 0 is refused
where it is no real value; ``CLEAR`` says it.
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
_MOST: Final = 2**63 - 1

NUMBERS: Final[dict[str, tuple[int, int]]] = {
    "cpu_period": (1_000, 1_000_000),
    "cpu_quota": (1_000, _MOST),
    "cpu_shares": (2, 262_144),
    "memory_limit": (1, _MOST),
    "memory_swap_limit": (1, _MOST),
    "oom_score_adj": (-1_000, 1_000),
}
"""Field to its least and greatest value."""
UNLIMITED: Final = frozenset(("cpu_quota", "memory_swap_limit"))
"""Where -1 means no limit."""
KUBELETS: Final[Mapping[str, tuple[str, ...]]] = {
    "labels": ("io.kubernetes.",),
    "annotations": ("io.kubernetes.container.", "io.kubernetes.pod."),
}
"""How keys begin that kubelet reads back from the runtime's lists (``pkg/kubelet/kuberuntime/labels.go``).

With another value of one of them kubelet takes a container for somebody else's, or for one whose pod has been
changed, and kills it or starts it anew.
"""
_FILE = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")
_PROPAGATIONS: Final = ("private", "host_to_container", "bidirectional")


class WrongError(ValueError):
    """A value that cannot be; the message says why."""


def number(field: str, value: object) -> int:
    """Check a number.

    Raises:
        WrongError: It is none, or out of its bounds.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise WrongError(f"it must be a whole number, not {type(value).__name__}")
    plain = int.__add__(value, 0)
    low, high = NUMBERS[field]
    if low <= plain <= high or (plain == -1 and field in UNLIMITED):
        return plain
    bounds = f"{low} to {high}" if high < _MOST else f"at least {low}"
    raise WrongError(f"it must be {bounds}" + (" or -1 for no limit" if field in UNLIMITED else ""))


def ids(kind: type[CpuSet] | type[Mask], value: Any, allowed: CpuSet | Mask | None) -> CpuSet | Mask:
    """Check CPUs or memory nodes: not empty, and of those that are allowed (None: not known here).

    Raises:
        WrongError: They are no such set, or too many.
    """
    if type(value) is not kind or type(value.bits) is not int:
        raise WrongError(f"it must be a {kind.__name__}, not {type(value).__name__}")
    if not value:
        raise WrongError("it must not be empty")
    if allowed is not None and value.bits & ~allowed.bits:
        raise WrongError(f"a hook may choose from {str(allowed) or 'none'} there")
    plain: CpuSet | Mask = kind.from_bits(value.bits)
    return plain


def text(value: object, most: int = LONGEST_VALUE, loose: bool = False) -> str:
    """Check a text: no NUL, not too long, and UTF-8.

    Args:
        value: The text.
        most: Characters.
        loose: Bytes that are no UTF-8 may be in it, as lone surrogates (``surrogateescape``).

    Raises:
        WrongError: It is none, or cannot be sent.
    """
    if type(value) is not str:
        if not isinstance(value, str):
            raise WrongError(f"it must be a text, not {type(value).__name__}")
        value = str.__str__(value)
    if len(value) > most:
        raise WrongError(f"it has {len(value)} characters, {most} are allowed")
    if "\0" in value:
        raise WrongError("it has a NUL character")
    if not value.isascii():
        try:
            value.encode("utf-8", "surrogateescape" if loose else "strict")
        except UnicodeError:
            raise WrongError("it cannot be written as UTF-8") from None
    return value


def key(value: object) -> str:
    """Check a key of a map: a text that is not empty.

    Raises:
        WrongError: It cannot be one.
    """
    word = text(value, LONGEST_KEY)
    if not word:
        raise WrongError("the key must not be empty")
    return word


def variable(value: object) -> str:
    """Check the name of a variable of the environment.

    Raises:
        WrongError: It has a ``=``, or cannot be a key.
    """
    word = key(value)
    if "=" in word:
        raise WrongError("the name of a variable cannot have a '='")
    return word


def cgroup_file(value: object) -> str:
    """Check the name of a file of cgroup v2.

    Raises:
        WrongError: It is none, or one that the engine alone writes.
    """
    word = key(value)
    if not _FILE.fullmatch(word):
        raise WrongError("it must be the name of a file of cgroup v2 such as memory.high")
    if word.startswith(("cpuset.", "cgroup.")):
        raise WrongError("files cpuset.* and cgroup.* are the engine's; CPUs and nodes are cpus and mems")
    return word


def path(value: object) -> str:
    """Check an absolute path that names something below the root; gives it as the runtimes spell it.

    ``/a/`` and ``/a`` are one place, so two hooks that name them must meet.

    Raises:
        WrongError: It is relative, the root itself, or goes up.
    """
    word = text(value, LONGEST_KEY)
    if ".." in word.split("/"):
        raise WrongError("the path must not have '..' in it")
    clean = "/" + posixpath.normpath(word).lstrip("/")
    if not word.startswith("/") or clean == "/":
        raise WrongError("the path must be absolute and not the root")
    return clean


def parent(value: object) -> str:
    """Check a cgroup's name, of either driver.

    Raises:
        WrongError: It is empty or goes up.
    """
    word = text(value, LONGEST_KEY)
    if not word.strip("/") or ".." in word.split("/"):
        raise WrongError("it must name a cgroup, without '..'")
    return word


def device(where: str, value: object) -> Device:
    """Check a device at its path in the container.

    Raises:
        WrongError: It is none.
    """
    if not isinstance(value, Device):
        raise WrongError(f"it must be a Device, not {type(value).__name__}")
    rights = text(value.permissions, 3)
    if not rights or set(rights) - set("rwm"):
        raise WrongError("permissions must be of r, w and m")
    return Device(_same(where, value.container_path), path(value.host_path), rights)


def mount(where: str, value: object) -> Mount:
    """Check a mount at its path in the container.

    Raises:
        WrongError: It is none.
    """
    if not isinstance(value, Mount):
        raise WrongError(f"it must be a Mount, not {type(value).__name__}")
    if not isinstance(value.readonly, bool):
        raise WrongError("readonly must be True or False")
    if value.propagation not in _PROPAGATIONS:
        raise WrongError(f"propagation must be one of {', '.join(_PROPAGATIONS)}")
    where = _same(where, value.container_path)
    return Mount(where, path(value.host_path), value.readonly, text(value.propagation))


def _same(where: str, value: object) -> str:
    word = path(value)
    if word != where:
        raise WrongError(f"its container_path is {word[:100]!r}, the key must be the same")
    return word
