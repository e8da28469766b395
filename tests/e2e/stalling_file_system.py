"""A file system that can stop answering, like a mount from an unreachable server.

It has one directory, implements the kernel's FUSE protocol (include/uapi/linux/fuse.h), and needs root and
/dev/fuse. While the file ``stall`` exists in its control directory, it reads requests without answering; it
answers them once that file is removed. Run as a program it mounts itself and serves until it is ended:

    stalling_file_system.py MOUNTPOINT CONTROL
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from private_runtime import PrivateRuntime

LOOKUP, FORGET, GETATTR, STATFS, INIT, OPENDIR, READDIR = 1, 2, 3, 17, 26, 27, 28
RELEASEDIR, INTERRUPT, DESTROY, BATCH_FORGET = 29, 36, 38, 42
NO_ANSWER = (FORGET, INTERRUPT, BATCH_FORGET)
HEAD_IN, HEAD_OUT = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
LARGEST = 1 << 17
POLL_S = 0.01


def attributes(node: int) -> bytes:
    """Return the answer to GETATTR: a directory whose attributes the kernel must not cache."""
    now = int(time.time())
    attr = ATTR.pack(node, 0, 0, now, now, now, 0, 0, 0, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 4096, 0)
    return struct.pack("<QII", 0, 0, 0) + attr


def answer(opcode: int, node: int) -> tuple[int, bytes]:
    """Return the error number and the body of the answer to a request."""
    if opcode == INIT:
        return 0, struct.pack("<IIIIHHIIHHI7I", 7, 31, 1 << 16, 0, 12, 9, 1 << 16, 1, 0, 0, *[0] * 8)
    if opcode == GETATTR:
        return 0, attributes(node)
    if opcode == OPENDIR:
        return 0, struct.pack("<QII", 1, 0, 0)
    if opcode == STATFS:
        return 0, struct.pack("<QQQQQIIII6I", 0, 0, 0, 0, 0, 4096, 255, 4096, 0, *[0] * 6)
    if opcode in (READDIR, RELEASEDIR, DESTROY):
        return 0, b""
    return (errno.ENOENT if opcode == LOOKUP else errno.ENOSYS), b""


def serve(fuse: int, stalls: Callable[[], bool]) -> None:
    """Answer requests until the file system is unmounted."""
    while True:
        try:
            request = os.read(fuse, LARGEST)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return
            if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                continue
            raise
        _, opcode, unique, node, *_ = HEAD_IN.unpack_from(request)
        while opcode not in (INIT, *NO_ANSWER) and stalls():
            time.sleep(POLL_S)
        if opcode in NO_ANSWER:
            continue
        number, body = answer(opcode, node)
        try:
            os.write(fuse, HEAD_OUT.pack(HEAD_OUT.size + len(body), -number, unique) + body)
        except OSError as error:
            if error.errno != errno.ENOENT:  # ENOENT: the request was interrupted
                raise


def main(mountpoint: str, control: str) -> None:
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fuse},rootmode={stat.S_IFDIR:o},user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    args = (arg.encode() for arg in ("stalling", mountpoint, "fuse.stalling"))
    if libc.mount(*args, 0, options.encode()):
        raise OSError(ctypes.get_errno(), "cannot mount", mountpoint)
    print("ready", flush=True)
    serve(fuse, (Path(control) / "stall").exists)


class StallingFileSystem:
    """The file system in the mount namespace of a private runtime.

    Attributes:
        path: Where it is mounted: the source of mounts for containers.
    """

    def __init__(self, runtime: PrivateRuntime, directory: Path) -> None:
        self.path = directory / "mounted"
        self._control = directory / "control"
        for made in (self.path, self._control):
            made.mkdir(parents=True)
        command = [sys.executable, __file__, str(self.path), str(self._control)]
        self._server = subprocess.Popen(runtime.inside(command), stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        if self._server.stdout.readline() != "ready\n":
            raise OSError("cannot mount the stalling file system")

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Leave all requests unanswered within the block."""
        (self._control / "stall").touch()
        try:
            yield
        finally:
            self.answer_again()

    def answer_again(self) -> None:
        """Answer requests again."""
        (self._control / "stall").unlink(missing_ok=True)

    def close(self) -> None:
        """End the file system; accesses to its mounts fail from then on."""
        self.answer_again()
        self._server.kill()
        self._server.wait()
        assert self._server.stdout is not None
        self._server.stdout.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
