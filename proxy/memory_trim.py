"""Keeps the memory of the daemon small.

A node daemon lives as long as the node, so modules that only its start needs must not stay in memory. These
are ``ssl`` and ``_hashlib``, which asyncio and hashlib load although the daemon does not use TLS; click and
yaml, after the configuration is read; and protobuf's implementation in Python if the one in C (upb) is in
use. ``make bench`` prints the memory of the process.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import types

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MADV_DONTNEED = 4
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TLS = ("ssl", "_hashlib")
_PYTHON_MESSAGES = "google.protobuf.internal.python_message"
_START_ONLY = (
    "click",
    "yaml",
    "_yaml",
    "proxy.cli",
    "proxy.config.load",
    "proxy.config.show",
    "gettext",
    "hpack",  # the relay has already taken the parts that it needs
)


def block_tls_imports() -> None:
    """Keep asyncio and hashlib from loading OpenSSL; both are made to work without it.

    Must be called before either is imported. A caller that needs TLS later calls ``allow_tls_imports`` first.
    """
    for name in _TLS:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None is how an import is barred


def allow_tls_imports() -> None:
    """Allow the import again: the next ``import ssl`` loads it."""
    for name in _TLS:
        if sys.modules.get(name, ...) is None:
            del sys.modules[name]


def block_python_protobuf() -> None:
    """Keep protobuf from loading its implementation in Python, with the text format and the decoders.

    protobuf's ``descriptor_pool`` and ``builder`` always import it, but use it only if there is no upb. Must
    be called before protobuf's classes are imported. Each of the other modules can still be imported.
    """
    from google.protobuf.internal import api_implementation

    if api_implementation.Type() == "upb":
        sys.modules.setdefault(_PYTHON_MESSAGES, types.ModuleType(_PYTHON_MESSAGES))


def drop_start_only_modules() -> None:
    """Forget modules that only reading the command line and the configuration needed.

    Modules that are imported later take their place in memory. A module that is still referenced stays alive.
    """
    for name in list(sys.modules):
        if name.startswith(_START_ONLY):
            del sys.modules[name]
    gc.collect()


def trim() -> None:
    """Return free memory to the kernel, if the C library can (glibc)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if the kernel does not report it."""
    try:
        with open("/proc/self/statm") as statm:  # noqa: PTH123  procfs, as it is
            return int(statm.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def _mallopt(*options: tuple[int, int]) -> bool:
    """Set options of the C library's allocator; False if it has no ``mallopt`` (not glibc) or refuses."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    mallopt.restype = ctypes.c_int
    accepted = [mallopt(*option) for option in options]  # all of them, even after a refused one
    return all(accepted)


def use_one_arena() -> bool:
    """Make all threads share one malloc arena (glibc); call it before there are threads.

    Each thread would otherwise get an arena of its own, which never shrinks below what it once needed.

    Returns:
        False if the C library cannot.
    """
    return _mallopt((_M_ARENA_MAX, 1))


def keep_large_blocks() -> bool:
    """Let the allocator keep blocks of up to 8 MiB and up to 16 MiB of free memory.

    A read of up to 256 KiB is above glibc's threshold of 128 KiB, from which on every block is mapped,
    faulted in and unmapped again (mallopt(3), ``M_MMAP_THRESHOLD``). A service unit can set the same in its
    environment (``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_``); this function is for other
    processes.

    Returns:
        False if the C library cannot; nothing depends on it.
    """
    return _mallopt((_M_MMAP_THRESHOLD, 8 << 20), (_M_TRIM_THRESHOLD, 16 << 20))


def freeze_modules() -> None:
    """Exclude all modules imported so far from garbage collection; used before calls are served.

    A full collection stops all threads for as long as it takes to visit every object, and with all modules
    that is tens of milliseconds, in the middle of the first reconcile.
    """
    gc.freeze()


def collect_and_freeze() -> None:
    """Exclude the start-up's objects from garbage collection; call it once, when everything is running."""
    gc.collect()
    gc.freeze()


def drop_clean_pages() -> int:
    """Unmap the pages of the interpreter and of libraries that are rarely used.

    A start runs through far more code than an idle daemon, and mapping one page of a file maps those around
    it. Clean pages stay in the page cache; a page that is needed again is mapped without reading the file.
    Mappings that hold a written page (relocated data) are left alone.

    Returns:
        Bytes of mappings that were dropped.
    """
    dropped = 0
    try:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start, end in _clean_mappings():
            if madvise(start, end - start, _MADV_DONTNEED) == 0:
                dropped += end - start
    except (AttributeError, OSError, ValueError):
        return dropped
    return dropped


def _clean_mappings() -> list[tuple[int, int]]:
    """Return the private mappings of files that cannot be written and hold no page of this process alone."""
    mappings: list[tuple[int, int]] = []
    place: tuple[int, int] | None = None
    with open("/proc/self/smaps") as maps:  # noqa: PTH123  procfs, as it is
        for line in maps:
            fields = line.split(None, 5)
            if not fields[0].endswith(":"):
                is_file_backed = fields[1] in ("r-xp", "r--p") and fields[-1].startswith("/")
                start, end = fields[0].split("-")
                place = (int(start, 16), int(end, 16)) if is_file_backed else None
            elif fields[0] == "Anonymous:" and place is not None and fields[1] == "0":
                mappings.append(place)
    return mappings
