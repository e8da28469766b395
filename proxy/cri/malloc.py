"""How the process uses memory: settings of the C library's allocator and of the garbage collector.

A read of up to 256 KiB is above glibc's threshold of 128 KiB, from which on every block is mapped, faulted in
and unmapped again. With a higher threshold the same block is reused: a list of 544 kB costs a third of the
CPU time, and the memory in use after messages of 15 MiB is lower, not higher. A service unit can say the same
in its environment (``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_``); this is for processes that are
started otherwise.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_BYTES: Final = 8 << 20
_TRIM_BYTES: Final = 16 << 20


def set_malloc_thresholds() -> bool:
    """Let the allocator keep blocks of up to 8 MiB and up to 16 MiB of free memory.

    Returns:
        False where the C library has no ``mallopt`` or refuses; nothing depends on it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    mallopt.restype = ctypes.c_int
    done = [mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES), mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)]
    return all(done)


def freeze_startup_objects() -> None:
    """Take what start-up has built out of the collector's sight; call it once, when everything is running."""
    gc.collect()
    gc.freeze()
