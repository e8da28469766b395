"""Random frames, good and bad, for either direction of a connection."""

from __future__ import annotations

import random
import struct
from typing import Final

from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

CREATE: Final = "/runtime.v1.RuntimeService/CreateContainer"
STOP: Final = "/runtime.v1.RuntimeService/StopContainer"
VERSION: Final = "/runtime.v1.RuntimeService/Version"
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)

_EIGHT_A: Final = bytes.fromhex("18c6318c63")
_huffman = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def integer(pattern: int, bits: int, value: int) -> bytes:
    mask = (1 << bits) - 1
    if value < mask:
        return bytes([pattern | value])
    out, value = bytearray([pattern | mask]), value - mask
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def text(rng: random.Random, value: bytes) -> bytes:
    if rng.random() < 0.5:
        # The encoder takes milliseconds for a long text: such a text is "a" again and again.
        coded = _huffman.encode(value) if len(value) < 64 else _EIGHT_A * (len(value) // 8)
        return integer(0x80, 7, len(coded)) + coded
    return integer(0, 7, len(value)) + value


def path(rng: random.Random) -> bytes:
    found = rng.choice(
        [CREATE, CREATE, CREATE, STOP, VERSION, CREATE[1:], "/", "", "x" * rng.randrange(3000)]
    )
    return found.encode()


def block(rng: random.Random, *, answer: bool) -> bytes:
    """A header block: mostly a good one."""
    parts = []
    if rng.random() < 0.1:
        parts.append(integer(0x20, 5, rng.choice([0, 100, 2000, 4096])))
    if answer:
        parts.append(b"\x88")
        if rng.random() < 0.6:
            status = rng.choice([b"0", b"5", b"x", b"9" * rng.randrange(20)])
            parts.append(b"\x00" + text(rng, b"grpc-status") + text(rng, status))
    else:
        parts.append(b"\x83\x86")
        kind = rng.choice([b"\x04", b"\x44", b"\x14"])
        parts.append(kind + text(rng, path(rng)))
        if rng.random() < 0.1:
            parts.append(b"\x40" + text(rng, b":path") + text(rng, path(rng)))
    for _ in range(rng.choice([0, 0, 1, 3, 30])):
        name, value = rng.randbytes(rng.randrange(20)), rng.randbytes(rng.choice([0, 5, 300, 6000]))
        parts.append(rng.choice([b"\x00", b"\x10", b"\x40"]) + text(rng, name) + text(rng, value))
    if rng.random() < 0.1:
        parts.append(integer(0x80, 7, rng.choice([1, 2, 7, 61])))
    if rng.random() < 0.01:
        parts.append(integer(0x80, 7, rng.choice([62, 63, 70, 200, 1 << 20])))
    if rng.random() < 0.005:
        parts.append(rng.randbytes(rng.randrange(1, 40)))
    return b"".join(parts)


def headers(rng: random.Random, stream: int, *, answer: bool) -> bytes:
    """HEADERS, perhaps with CONTINUATION, padding and priority."""
    whole, flags = block(rng, answer=answer), int(rng.random() < (0.4 if answer else 0.05))
    before = after = b""
    if rng.random() < 0.2:
        after = bytes(rng.randrange(10))
        before, flags = bytes([len(after)]), flags | 8
    if rng.random() < 0.2:
        before, flags = before + bytes(5), flags | 0x20
    cuts = sorted(rng.sample(range(len(whole) + 1), min(len(whole), rng.choice([0, 0, 0, 1, 3]))))
    if len(whole) > 16_000:
        cuts = list(range(16_000, len(whole), 16_000))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    out = [frame(HEADERS, flags | (4 if len(pieces) == 1 else 0), stream, before + pieces[0] + after)]
    out += [
        frame(CONTINUATION, 4 if n == len(pieces) - 2 else 0, stream, piece)
        for n, piece in enumerate(pieces[1:])
    ]
    return b"".join(out)


def body(rng: random.Random, room: int) -> bytes:
    """What a DATA frame may carry: gRPC messages, parts of some, nothing."""
    size = min(room, rng.choice([0, 1, 2, 5, 50, 5000, 16_384]))
    message = bytes(rng.choice([0, 5, 40, 3000]))
    whole = struct.pack(">BI", rng.choice([0, 0, 0, 0, 1]), len(message)) + message
    return rng.choice([whole, whole, whole + b"!", whole * 2, whole[:-1], rng.randbytes(size), bytes(size)])[
        :room
    ]


def data(rng: random.Random, stream: int, room: int, *, end: bool) -> bytes:
    content, flags = body(rng, min(room, 16_384)), int(end)
    if rng.random() < 0.1 and len(content) + 10 < room and len(content) < 16_000:
        pad = rng.randrange(9)
        return frame(DATA, flags | 8, stream, bytes([pad]) + content + bytes(pad))
    return frame(DATA, flags, stream, content)


def control(rng: random.Random, stream: int) -> bytes:
    """A frame that belongs to neither a header nor a body."""
    word = struct.pack(">I", rng.choice([1, 100, 65_535, 1 << 20, rng.randrange(1 << 31)]))
    pairs = [
        rng.choice(
            [(1, 0), (1, 100), (1, 4096), (1, 1 << 16), (2, 0), (3, 100), (4, 0), (4, 100), (4, 1 << 20)]
        )
        for _ in range(rng.randrange(3))
    ]
    pairs += [(5, rng.choice([16_384, 20_000, (1 << 24) - 1]))] * (rng.random() < 0.1)
    return rng.choice(
        [
            frame(WINDOW, 0, rng.choice([0, stream]), word),
            frame(WINDOW, 0, rng.choice([0, stream]), struct.pack(">I", 70_000)),
            frame(RST, 0, stream, struct.pack(">I", rng.choice([0, 2, 8]))),
            frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs)),
            frame(SETTINGS, 1, 0),
            frame(PING, rng.choice([0, 1]), 0, bytes(8)),
            frame(PRIORITY, 0, stream, bytes(5)),
            frame(rng.choice([0x10, 0xBE]), rng.randrange(256), stream, rng.randbytes(rng.randrange(30))),
        ]
    )


def rare(rng: random.Random, stream: int) -> bytes:
    """What mostly ends a connection."""
    return rng.choice(
        [
            frame(GOAWAY, 0, 0, struct.pack(">II", rng.randrange(stream + 2), 0)),
            frame(PUSH, 4, stream, struct.pack(">I", 2) + b"\x88"),
            frame(
                rng.randrange(12),
                rng.randrange(256),
                rng.choice([0, stream]),
                rng.randbytes(rng.randrange(40)),
            ),
            frame(CONTINUATION, 4, stream, b"\x88"),
            struct.pack(">IBI", rng.randrange(1 << 32), 0, stream),
            rng.randbytes(rng.randrange(1, 60)),
            frame(DATA, 0, stream) * rng.choice([10, 2000]),
        ]
    )


def cut(rng: random.Random, whole: bytes) -> list[bytes]:
    """The same bytes as reads may bring them."""
    out = []
    while whole:
        count = rng.choice([1, 9, 100, 5000, 1 << 18, 1 << 18])
        out.append(whole[:count])
        whole = whole[count:]
    return out
