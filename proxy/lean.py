"""Keeping the daemon small.

A node daemon lives as long as the node, so what is needed only to start it must not stay. Measured on Python
3.11 (resident memory): ``ssl`` and ``_hashlib``, which asyncio and hashlib load although nothing here speaks
TLS, 5 MB; click and yaml, once the configuration is read, 3 MB.
"""

from __future__ import annotations

import ctypes
import gc
import sys

_M_ARENA_MAX = -8
_MADV_RANDOM, _MADV_DONTNEED = 1, 4
_TLS = ("ssl", "_hashlib")
_START_ONLY = ("click", "yaml", "_yaml", "proxy.cli", "proxy.config.load", "proxy.config.show", "gettext")


def without_tls() -> None:
    """Keep asyncio and hashlib from loading OpenSSL; both are made to work without it.

    Must be called before either is imported. Who needs TLS later calls ``allow_tls`` first.
    """
    for name in _TLS:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None is how an import is barred


def allow_tls() -> None:
    """Lift the bar: the next ``import ssl`` loads it."""
    for name in _TLS:
        if sys.modules.get(name, ...) is None:
            del sys.modules[name]


def drop_start_only_modules() -> None:
    """Forget modules that only reading the command line and the configuration needed.

    What is imported next takes their place in memory. A module that somebody still refers to stays alive.
    """
    for name in list(sys.modules):
        if name.startswith(_START_ONLY):
            del sys.modules[name]
    gc.collect()


def trim() -> None:
    """Give memory that is free back to the kernel, where the C library can (glibc)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return


def one_arena() -> bool:
    """Have all threads share one malloc arena (glibc); call it before there are threads.

    Each thread would otherwise get an arena of its own, which never shrinks below what it once needed.

    Returns:
        False where the C library cannot.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1))
    except (AttributeError, OSError):
        return False


def drop_clean_pages(library: str) -> int:
    """Unmap the pages of a library that is used now and then.

    Loading a large library maps far more of it than is ever used. Pages that nobody wrote to stay in the page
    cache; what is needed next is mapped again, page by page (MADV_RANDOM keeps the kernel from mapping the
    neighbours too). Mappings that hold a written page (relocated data) are left alone.

    Args:
        library: Part of the file's name.

    Returns:
        Bytes of mappings that were dropped.
    """
    dropped = 0
    try:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, end in _clean_mappings(library):
            if madvise(start, end - start, _MADV_RANDOM) == 0 == madvise(start, end - start, _MADV_DONTNEED):
                dropped += end - start
    except (AttributeError, OSError, ValueError):
        return dropped
    return dropped


def _clean_mappings(library: str) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    place: tuple[int, int] | None = None
    with open("/proc/self/smaps") as maps:  # noqa: PTH123  procfs, as it is
        for line in maps:
            words = line.split()
            if not words[0].endswith(":"):
                ours = words[1] in ("r-xp", "r--p") and library in line.rpartition("/")[2]
                start, end = words[0].split("-")
                place = (int(start, 16), int(end, 16)) if ours else None
            elif words[0] == "Anonymous:" and place is not None and words[1] == "0":
                found.append(place)
    return found
