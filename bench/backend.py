"""A container runtime that costs as little as a Python process can, so that measurements show the proxy.

    python bench/backend.py --listen /tmp/x/runtime.sock

Answers are built once. Only CreateContainer and UpdateContainerResources are decoded: a create is answered
with the id ``<cpus>|<mems>|<number of envs>|<request bytes>|<0..109>``, which shows what a proxy wrote and
names as many containers as a node has pods. With ``--sandbox`` it lists the sandbox of these creates,
otherwise none. Flow control is strict in both directions: a peer that sends more than the window loses its
connection. Runs until SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import selectors
import signal
import socket
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import messages
from frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MAX_FRAME,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Encoder,
    Inflow,
    Outbox,
    PathReader,
    PeerError,
    frame,
    literal,
    message,
    one_message,
    unpadded,
)

from proxy.api.cri import api_pb2 as pb

STREAM_WINDOW = CONNECTION_WINDOW = 65_535  # the protocol's defaults: held bodies reach them at once
CONTAINERS = 110
_OPEN_ENDED = (b"GetContainerEvents", b"Subscribe")
_FIRST = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_LAST = ((b"grpc-status", b"0"),)


class RuntimeAnswers:
    """Method and request body in, framed answer out."""

    def __init__(self, *, sandbox: bool = False) -> None:
        self.fixed = {
            b"Version": message(messages.version_answer()),
            b"Status": message(messages.status_answer()),
            b"ContainerStatus": message(messages.container_status(messages.identifier(7))),
        }
        if sandbox:
            self.fixed[b"ListPodSandbox"] = message(messages.sandbox_list())
        self.lists = {str(count): message(messages.container_list(count)) for count in (10, 100, 1000)}
        self.empty = message(b"")
        self.creates = 0

    def answer(self, method: bytes, body: bytes) -> bytes:
        """Answer one call; raises google.protobuf's DecodeError for an invalid body."""
        if method == b"CreateContainer":
            return self._create(body)
        if method == b"ListContainers":
            chosen = pb.ListContainersRequest.FromString(body).filter.label_selector.get("n", "")
            return self.lists.get(chosen, self.empty)
        if method == b"ContainerStatus" and b"big:" in body:
            size = int(pb.ContainerStatusRequest.FromString(body).container_id.partition(":")[2])
            return message(messages.big_answer(size))
        if method == b"UpdateContainerResources":
            pb.UpdateContainerResourcesRequest.FromString(body)
        return self.fixed.get(method, self.empty)

    def _create(self, body: bytes) -> bytes:
        request = pb.CreateContainerRequest.FromString(body)
        wrote = request.config.linux.resources
        self.creates += 1
        text = f"{wrote.cpuset_cpus}|{wrote.cpuset_mems}|{len(request.config.envs)}|{len(body)}"
        text += f"|{self.creates % CONTAINERS}"
        return message(pb.CreateContainerResponse(container_id=text).SerializeToString())


class PeerConnection:
    """One accepted connection."""

    def __init__(self, sock: socket.socket, answers: RuntimeAnswers) -> None:
        self.sock = sock
        self.answers = answers
        self.outbox = Outbox()
        self.inflow = Inflow(self.outbox, STREAM_WINDOW, CONNECTION_WINDOW)
        self.inflow.greet()
        self.paths = PathReader()
        self.encoder = Encoder()
        self.heads: dict[tuple[tuple[bytes, bytes], ...], bytes] = {}
        self.requests: dict[int, tuple[bytes, list[bytes]]] = {}
        self.block: tuple[int, int, bytearray] | None = None
        self.held = b""
        self.greeted = False
        self.pending = memoryview(b"")

    def feed(self, data: bytes) -> None:
        """Take received bytes; bytes to send wait in the outbox."""
        data = self.held + data if self.held else data
        pos, end = 0, len(data)
        if not self.greeted:
            if end < len(PREFACE):
                self.held = data
                return
            if not data.startswith(PREFACE):
                raise PeerError("no preface")
            pos, self.greeted = len(PREFACE), True
        while end - pos >= 9:
            size, kind, flags = int.from_bytes(data[pos : pos + 3], "big"), data[pos + 3], data[pos + 4]
            if size > MAX_FRAME:
                raise PeerError("a frame that is too long")
            if end - pos - 9 < size:
                break
            stream = int.from_bytes(data[pos + 5 : pos + 9], "big") & 0x7FFFFFFF
            pos += 9
            self._frame(kind, flags, stream, data[pos : pos + size])
            pos += size
        self.held = data[pos:]

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self.block is not None and kind != CONTINUATION:
            raise PeerError("a header block that is interrupted")
        if kind == DATA:
            self._data(flags, stream, payload)
        elif kind == HEADERS:
            if flags & (PADDED | PRIORITY):
                payload = bytes(unpadded(flags, payload, HEADERS))
            self._headers(flags, stream, payload)
        elif kind == WINDOW_UPDATE:
            self.outbox.on_window(stream, int.from_bytes(payload, "big") & 0x7FFFFFFF)
        elif kind == SETTINGS:
            self.outbox.on_settings(flags, payload)
        elif kind == PING and not flags & ACK:
            self.outbox.out.append(frame(PING, ACK, 0, payload))
        elif kind == RST_STREAM:
            self.requests.pop(stream, None)
            self.inflow.forget(stream)
            self.outbox.close(stream)
        elif kind == CONTINUATION:
            if self.block is None or self.block[0] != stream:
                raise PeerError("a continuation of nothing")
            begun = self.block
            begun[2].extend(payload)
            if flags & END_HEADERS:
                self.block = None
                self._open(stream, begun[1], bytes(begun[2]))

    def _headers(self, flags: int, stream: int, payload: bytes) -> None:
        if flags & END_HEADERS:
            self._open(stream, flags, payload)
        else:
            self.block = (stream, flags, bytearray(payload))

    def _open(self, stream: int, flags: int, block: bytes) -> None:
        method = self.paths.path(block).rpartition(b"/")[2]
        self.requests[stream] = (method, [])
        self.outbox.open(stream)
        if flags & END_STREAM:
            self._finish(stream)

    def _data(self, flags: int, stream: int, payload: bytes) -> None:
        ended = bool(flags & END_STREAM)
        self.inflow.on_data(stream, len(payload), ended=ended)
        request = self.requests.get(stream)
        if request is None:
            return
        if flags & PADDED:
            payload = bytes(unpadded(flags, payload, DATA))
        request[1].append(payload)
        if ended:
            self._finish(stream)

    def _finish(self, stream: int) -> None:
        method, parts = self.requests.pop(stream)
        if method in _OPEN_ENDED:
            self.requests[stream] = (method, [])
            self.outbox.out.append(frame(HEADERS, END_HEADERS, stream, self._head(_FIRST)))
            return
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        try:
            answer = self.answers.answer(method, one_message(body))
        except Exception as error:  # noqa: BLE001 - any bad body gets an error answer, as from a real runtime
            tail = b"\x88" + literal(b"content-type", b"application/grpc") + literal(b"grpc-status", b"3")
            tail += literal(b"grpc-message", type(error).__name__.encode())
            self.outbox.out.append(frame(HEADERS, END_HEADERS | END_STREAM, stream, tail))
            self.outbox.close(stream)
            return
        begin = frame(HEADERS, END_HEADERS, stream, self._head(_FIRST))
        end = frame(HEADERS, END_HEADERS | END_STREAM, stream, self._head(_LAST))
        self.outbox.send(stream, begin, answer, end)

    def _head(self, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
        """A header block of an answer; as soon as all names are in the client's table, it stays the same."""
        settled = self.heads.get(headers)
        if settled is not None:
            return settled
        before = self.encoder.added
        block = self.encoder.encode(headers)
        if self.encoder.added == before:
            self.heads[headers] = block
        return block


class Backend:
    """The listening socket and its connections."""

    def __init__(self, path: str, answers: RuntimeAnswers | None = None) -> None:
        self.selector = selectors.DefaultSelector()
        self.answers = answers if answers is not None else RuntimeAnswers()
        self.server = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()
        self.server.bind(path)
        self.server.listen(128)
        self.server.setblocking(False)
        self.selector.register(self.server, selectors.EVENT_READ, None)

    def run(self) -> None:
        while True:
            for key, events in self.selector.select():
                if key.data is None:
                    self._accept()
                else:
                    self._serve(key.data, events)

    def _accept(self) -> None:
        sock, _ = self.server.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        peer = PeerConnection(sock, self.answers)
        self.selector.register(sock, selectors.EVENT_READ, peer)
        self._serve(peer, 0)

    def _serve(self, peer: PeerConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read(peer)
            self._write(peer)
        except (PeerError, OSError) as error:
            if isinstance(error, PeerError):
                print(f"connection ended: {error}", file=sys.stderr, flush=True)
                with contextlib.suppress(OSError):
                    peer.sock.send(frame(GOAWAY, 0, 0, struct.pack(">II", 0, 1)))
            self.selector.unregister(peer.sock)
            peer.sock.close()

    @staticmethod
    def _read(peer: PeerConnection) -> None:
        data = peer.sock.recv(262_144)
        if not data:
            raise ConnectionResetError
        peer.feed(data)

    def _write(self, peer: PeerConnection) -> None:
        had = bool(peer.pending)
        peer.inflow.grant()
        while peer.pending or peer.outbox.out:
            peer.pending = peer.pending or memoryview(peer.outbox.take())
            try:
                sent = peer.sock.send(peer.pending)
            except BlockingIOError:
                break
            peer.pending = peer.pending[sent:]
        if bool(peer.pending) != had:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.pending else 0)
            self.selector.modify(peer.sock, events, peer)


def main() -> None:
    options = argparse.ArgumentParser(description="A light CRI runtime for measuring.")
    options.add_argument("--listen", required=True, metavar="SOCKET")
    options.add_argument("--sandbox", action="store_true", help="list the sandbox of creates")
    chosen = options.parse_args()
    backend = Backend(chosen.listen, RuntimeAnswers(sandbox=chosen.sandbox))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    backend.run()


if __name__ == "__main__":
    main()
