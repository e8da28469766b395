"""Helpers for tests of hostile clients: a process with a front, its runtime, and raw clients."""

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CREATE = b"/runtime.v1.RuntimeService/CreateContainer"
VERSION = b"/runtime.v1.RuntimeService/Version"
DATA, HEADERS, RST, SETTINGS, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 7, 8, 9
MIB = 1 << 20


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def grpc(message):
    return struct.pack(">BI", 0, len(message)) + message


def path_block(path):
    """A header block without table entries: POST, http, the path."""
    return b"\x83\x86\x04" + bytes([len(path)]) + path


def open_stream(stream, path, flags=4):
    return frame(HEADERS, flags, stream, path_block(path))


def call(stream, path, message):
    body = grpc(message)
    pieces = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
    data = b"".join(frame(DATA, at == len(pieces) - 1, stream, piece) for at, piece in enumerate(pieces))
    return open_stream(stream, path) + data


class Runtime:
    """A server that answers each call with OK and returns all flow-control window."""

    def __init__(self, path):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(256)
        self.ends = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                end = self.listener.accept()[0]
                self.ends.append(end)
                threading.Thread(target=self.serve, args=(end,), daemon=True).start()

    def serve(self, end):
        with contextlib.suppress(OSError):
            # A stream may send 1 GiB, the connection too.
            end.sendall(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 30)) + window(0, (1 << 30) - 65_535))
            data = bytearray()
            while piece := end.recv(MIB):
                data += piece
                self.handle(end, data)

    def handle(self, end, data):
        if data.startswith(PREFACE[:3]):
            if len(data) < len(PREFACE):
                return
            del data[: len(PREFACE)]
        at, out, received = 0, [], 0
        while len(data) - at >= 9:
            header, flags, stream = struct.unpack_from(">IBI", data, at)
            if len(data) - at < 9 + (header >> 8):
                break
            at += 9 + (header >> 8)
            if header & 255 == DATA:
                received += header >> 8
            if header & 255 == SETTINGS and not flags & 1:
                out.append(frame(SETTINGS, 1, 0))
            if header & 255 in (DATA, HEADERS) and flags & 1:
                out.append(frame(HEADERS, 5, stream, b"\x88\x00\x0bgrpc-status\x010"))
        del data[:at]
        if received:
            out.append(window(0, received))
        end.sendall(b"".join(out))

    def close(self):
        for end in [self.listener, *self.ends]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def window(stream, count):
    return frame(WINDOW, 0, stream, struct.pack(">I", count))


class Client:
    """A raw connection."""

    def __init__(self, path):
        self.end = socket.socket(socket.AF_UNIX)
        self.end.connect(str(path))
        self.end.sendall(PREFACE + frame(SETTINGS, 0, 0))
        self.data = bytearray()
        self.streams = 1
        self.window = 65_535  # of the connection; the runtime's SETTINGS give each stream enough
        self.frames(until=lambda kind, flags, stream, _: kind == SETTINGS and not flags)
        self.end.sendall(frame(SETTINGS, 1, 0))

    def send(self, data, limit=30.0):
        """Send without reading; returns the bytes sent until the peer stopped reading or closed."""
        self.end.settimeout(limit)
        sent = 0
        try:
            while sent < len(data):
                sent += self.end.send(data[sent : sent + 65_536])
        except OSError:
            pass
        return sent

    def frames(self, limit=60.0, until=lambda kind, flags, stream, payload: False):
        """Read frames until one satisfies ``until``, the peer closes, or time is over."""
        seen, end = [], time.monotonic() + limit
        while True:
            while len(self.data) >= 9:
                header, flags, stream = struct.unpack_from(">IBI", self.data)
                if len(self.data) < 9 + (header >> 8):
                    break
                payload = bytes(self.data[9 : 9 + (header >> 8)])
                del self.data[: 9 + (header >> 8)]
                seen.append((header & 255, flags, stream, payload))
                if header & 255 == WINDOW and not stream:
                    self.window += struct.unpack(">I", payload)[0]
                if until(*seen[-1]):
                    return seen
            if not select.select([self.end], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError(f"only {len(seen)} frames were received")
            try:
                piece = self.end.recv(MIB)
            except ConnectionError:
                return seen
            if not piece:
                return seen
            self.data += piece

    def answered(self, path=VERSION, message=b"v", limit=60.0):
        """Make a call; returns whether the answer was OK."""
        stream = self.streams
        self.upload(path, grpc(message), limit)
        seen = self.frames(limit, lambda kind, flags, sid, _: kind == HEADERS and sid == stream)
        return bool(seen) and seen[-1][0] == HEADERS and seen[-1][3].endswith(b"\x0bgrpc-status\x010")

    def hold(self, size, limit=20.0):
        """Send ``size`` bytes of a body that never ends, as windows allow; returns the bytes sent."""
        return self.upload(CREATE, b"\0\xff\xff\xff\xff" + bytes(size), limit, end=False)

    def upload(self, path, body, limit=20.0, *, end=True):
        """Begin a call, as windows allow; returns the bytes sent until the peer refused it or closed."""
        stream, self.streams = self.streams, self.streams + 2
        self.send(open_stream(stream, path))
        sent = 0
        while sent < len(body):
            count = min(16_384, len(body) - sent, self.window)
            if not count:
                seen = self.frames(limit, lambda kind, flags, sid, _: kind == RST or self.window)
                if not seen or seen[-1][0] == RST:
                    return sent
                continue
            last = end and sent + count == len(body)
            if not self.send(frame(DATA, last, stream, body[sent : sent + count]), limit):
                return sent
            sent += count
            self.window -= count
        return sent

    def close(self):
        self.end.close()


class Bed:
    """A front in a separate process."""

    def __init__(self, directory, **options):
        self.path = directory / "front"
        self.runtime = Runtime(directory / "runtime")
        argv = [
            sys.executable,
            str(HERE / "cri_front_process.py"),
            str(self.path),
            str(directory / "runtime"),
        ]
        env = {**os.environ, "PYTHONPATH": os.environ.get("FRONT_TREE", str(HERE.parent.parent))}
        self.process = subprocess.Popen(
            [*argv, json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.lines = []
        assert self.process.stdout.readline() == "ready\n"
        # Without compiled modules (a fresh checkout) the start itself takes more memory than any attack.
        with open(f"/proc/{self.process.pid}/clear_refs", "w") as file:
            file.write("5")  # sets VmHWM to VmRSS, see proc_pid_clear_refs(5)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        self.clients = []

    def read(self):
        for line in self.process.stdout:
            self.lines.append(line.strip())

    def client(self):
        self.clients.append(Client(self.path))
        return self.clients[-1]

    def end(self):
        """End the process; return all lines of its output."""
        self.process.stdin.close()
        self.process.wait(60)
        self.reader.join(60)
        return self.lines

    def rss(self):
        """The resident memory in MiB."""
        with open(f"/proc/{self.process.pid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024

    def peak(self):
        """The peak of the resident memory since the process is ready, in MiB."""
        with open(f"/proc/{self.process.pid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024

    def cpu(self):
        """The CPU time in seconds."""
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self):
        for client in self.clients:
            client.close()
        self.end()
        self.process.stdout.close()
        self.runtime.close()
