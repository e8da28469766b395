"""A wall clock that is wrong for one process: a library that is loaded first adds seconds from a file."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long seconds(void) {
    long found = 0;
    FILE *file = fopen(getenv("WRONG_CLOCK"), "r");
    if (file) { if (fscanf(file, "%ld", &found) != 1) found = 0; fclose(file); }
    return found;
}
int clock_gettime(clockid_t id, struct timespec *to) {
    int answer = syscall(SYS_clock_gettime, id, to);
    if (answer == 0 && id == CLOCK_REALTIME) to->tv_sec += seconds();
    return answer;
}
int gettimeofday(struct timeval *to, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    to->tv_sec = now.tv_sec; to->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
"""


class WrongClock:
    """The clock of a process that is started with ``environment``; ``set`` steps it at any time."""

    def __init__(self, directory: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler")
        self._file, library = directory / "seconds", directory / "wrong_clock.so"
        source = directory / "wrong_clock.c"
        source.write_text(_SOURCE)
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        self.set(0)
        self.environment = {"LD_PRELOAD": str(library), "WRONG_CLOCK": str(self._file)}

    def set(self, seconds: int) -> None:
        """Set the clock ahead by some seconds, or behind."""
        new = self._file.with_suffix(".new")
        new.write_text(str(seconds))
        new.rename(self._file)
