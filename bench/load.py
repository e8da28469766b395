"""Load on a CRI socket over raw HTTP/2: one connection, K calls in flight, one line of JSON.

    python bench/load.py --target /tmp/x/cri.sock --call Create --conc 64 -n 5000 --dur 2

Header blocks are made before the clock starts, and are what kubelet's grpc-go sends: everything enters the
header table, and grpc-timeout differs in each call. A run is limited by ``-n`` and by ``--dur``; a connection
that is silent for ``--stall`` seconds with calls in flight ends the run, and those calls are counted as
stalls.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import messages
from frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    AnswerReader,
    Encoder,
    Inflow,
    Outbox,
    PeerError,
    frame,
    message,
    unpadded,
)

STREAM_WINDOW = 1 << 20
CONNECTION_WINDOW = 4 << 20
_RECEIVE = 1 << 19


@dataclass(slots=True)
class Result:
    """The results of a run; times in microseconds, ``calls`` with those before the clock started."""

    call: str
    conc: int
    calls: int = 0
    n: int = 0
    errors: int = 0
    stalls: int = 0
    first_error: str = ""
    p50_us: float = 0.0
    p95_us: float = 0.0
    p99_us: float = 0.0
    calls_per_s: float = 0.0
    answer_bytes: int = 0
    sample: str = ""


def header_blocks(path: bytes, count: int) -> list[bytes]:
    """The header blocks of ``count`` calls, in the order in which they must be sent."""
    encoder = Encoder()
    same = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"user-agent", b"grpc-go/1.80.0"),
        (b"te", b"trailers"),
    )
    timeouts = (b"%dm" % (119_990 - i * 37 % 5_000) for i in range(count))
    return [encoder.encode((*same, (b"grpc-timeout", timeout))) for timeout in timeouts]


@dataclass(slots=True)
class _OpenCall:
    begun: int
    size: int = 0
    start: bytes = b""


class LoadClient:
    """One connection and the calls on it."""

    def __init__(self, target: str, call: messages.Call, blocks: Sequence[bytes], stall: float) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(target)
        self.sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(stall), int(stall % 1 * 1e6))
        )
        self.stall = stall
        self.call = call
        self.body = message(call.body)
        self.blocks = blocks
        self.used = 0
        self.outbox = Outbox()
        self.outbox.out.append(PREFACE)
        self.inflow = Inflow(self.outbox, STREAM_WINDOW, CONNECTION_WINDOW)
        self.inflow.greet()
        self.reader = AnswerReader()
        self.open: dict[int, _OpenCall] = {}
        self.times: list[int] = []
        self.errors: list[str] = []
        self.answer_bytes = 0
        self.sample = b""
        self.buffer = bytearray(_RECEIVE)
        self.view = memoryview(self.buffer)
        self.have = 0
        self.pending = memoryview(b"")

    def begin(self) -> None:
        """Start one call."""
        stream = 2 * self.used + 1
        self.outbox.open(stream)
        self.open[stream] = _OpenCall(time.perf_counter_ns())
        head = frame(HEADERS, END_HEADERS, stream, self.blocks[self.used])
        self.used += 1
        self.outbox.send(stream, head, self.body)

    def exchange(self) -> bool:
        """Send all data that may be sent and read once; False if the connection was silent too long or
        ended."""
        self.inflow.grant()
        out = self.outbox.out
        while self.pending or out:
            self.pending = self.pending or memoryview(self.outbox.take())
            try:
                self.pending = self.pending[self.sock.send(self.pending, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                break
        if self.pending:
            poll = select.poll()
            poll.register(self.sock, select.POLLIN | select.POLLOUT)
            ready = poll.poll(self.stall * 1000)
            if not ready or not ready[0][1] & ~select.POLLOUT:
                return bool(ready)
        try:
            got = self.sock.recv_into(self.view[self.have :])
        except BlockingIOError:
            return False
        if not got:
            raise ConnectionResetError("the connection was closed")
        self._parse(self.have + got)
        return True

    def _parse(self, end: int) -> None:
        buffer, pos = self.buffer, 0
        while end - pos >= 9:
            size = buffer[pos] << 16 | buffer[pos + 1] << 8 | buffer[pos + 2]
            if end - pos - 9 < size:
                break
            kind, flags = buffer[pos + 3], buffer[pos + 4]
            stream = int.from_bytes(buffer[pos + 5 : pos + 9], "big") & 0x7FFFFFFF
            pos += 9
            if kind == DATA:
                self._data(flags, stream, pos, size)
            else:
                self._other(kind, flags, stream, bytes(buffer[pos : pos + size]))
            pos += size
        self.have = end - pos
        if self.have and pos:
            buffer[: self.have] = buffer[pos:end]

    def _data(self, flags: int, stream: int, pos: int, size: int) -> None:
        self.inflow.on_data(stream, size, ended=bool(flags & END_STREAM))
        call = self.open.get(stream)
        if call is None:
            return
        if not call.size:
            call.start = bytes(self.buffer[pos : pos + min(size, 200)])
        call.size += size
        if flags & END_STREAM:
            self._end(stream, "no trailers")

    def _other(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == HEADERS:
            if flags & (PADDED | PRIORITY):
                payload = bytes(unpadded(flags, payload, HEADERS))
            if not flags & END_HEADERS:
                raise PeerError("answer headers in several frames are not followed")
            headers = self.reader.headers(payload)
            if flags & END_STREAM:
                status = headers.get(b"grpc-status", b"?")
                text = headers.get(b"grpc-message", b"").decode(errors="replace")
                self._end(stream, "" if status == b"0" else f"status {status.decode()} {text}")
        elif kind == WINDOW_UPDATE:
            self.outbox.on_window(stream, int.from_bytes(payload, "big") & 0x7FFFFFFF)
        elif kind == SETTINGS:
            self.outbox.on_settings(flags, payload)
        elif kind == PING and not flags & ACK:
            self.outbox.out.append(frame(PING, ACK, 0, payload))
        elif kind == RST_STREAM:
            self._end(stream, f"reset with code {int.from_bytes(payload, 'big')}")
        elif kind == GOAWAY:
            raise PeerError(f"GOAWAY with code {int.from_bytes(payload[4:8], 'big')}: {payload[8:]!r}")

    def _end(self, stream: int, error: str) -> None:
        call = self.open.pop(stream, None)
        if call is None:
            return
        self.inflow.forget(stream)
        self.outbox.close(stream)
        if not error and call.size - 5 < self.call.least:
            error = f"an answer of {call.size - 5} bytes"
        elif not error and self.call.expect not in call.start:
            error = f"unexpected answer {call.start[:80]!r}"
        if error:
            self.errors.append(error)
        else:
            self.times.append(time.perf_counter_ns() - call.begun)
            self.answer_bytes, self.sample = call.size - 5, call.start


def _turn(client: LoadClient, result: Result) -> bool:
    try:
        if client.exchange():
            return True
        result.stalls += len(client.open)
        client.errors += ["stalled"] * len(client.open)
    except (OSError, PeerError) as error:
        client.errors += [f"{type(error).__name__}: {error}"] * max(1, len(client.open))
    return False


def run_load(
    target: str,
    name: str,
    *,
    conc: int,
    n: int,
    dur: float,
    warm: int = 50,
    expect: bytes = b"",
    stall: float = 5.0,
) -> Result:
    """Load ``target``; a fault of the target never raises."""
    call = messages.call(name, expect)
    result = Result(name, conc)
    try:
        client = LoadClient(target, call, header_blocks(call.path, n + warm), stall)
    except OSError as error:
        result.errors, result.first_error = 1, f"cannot connect to {target}: {error}"
        return result
    alive = True
    for _ in range(warm):
        client.begin()
        while alive and client.open:
            alive = _turn(client, result)
    client.times.clear()
    begun = time.perf_counter()
    end = begun + dur
    while alive:
        if time.perf_counter() < end:
            while len(client.open) < conc and client.used < n + warm:
                client.begin()
        if not client.open:
            break
        alive = _turn(client, result)
    took = time.perf_counter() - begun
    client.sock.close()
    result.calls, result.n, result.errors = client.used, len(client.times), len(client.errors)
    result.first_error = client.errors[0] if client.errors else ""
    result.answer_bytes = client.answer_bytes
    result.sample = client.sample[7:80].decode(
        "ascii", "replace"
    )  # past the gRPC header and one short field's
    if times := sorted(client.times):
        quantiles = [
            times[min(int(share * len(times)), len(times) - 1)] / 1000 for share in (0.5, 0.95, 0.99)
        ]
        result.p50_us, result.p95_us, result.p99_us = quantiles
        result.calls_per_s = len(times) / took
    return result


def main() -> None:
    options = argparse.ArgumentParser(description="Load on a CRI socket; prints one line of JSON.")
    options.add_argument("--target", required=True, metavar="SOCKET")
    options.add_argument("--call", default="Version", choices=messages.CALLS)
    options.add_argument("--conc", type=int, default=1, help="calls in flight")
    options.add_argument("-n", type=int, default=1000, help="most calls")
    options.add_argument("--dur", type=float, default=2.0, help="longest time, s")
    options.add_argument("--warm", type=int, default=50, help="calls before the clock starts")
    options.add_argument("--expect", default="", help="text that every answer contains")
    options.add_argument("--stall", type=float, default=5.0, help="silence that ends the run, s")
    chosen = options.parse_args()
    result = run_load(
        chosen.target,
        chosen.call,
        conc=chosen.conc,
        n=chosen.n,
        dur=chosen.dur,
        warm=chosen.warm,
        expect=chosen.expect.encode(),
        stall=chosen.stall,
    )
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
