"""Huffman coded header strings (RFC 7541, 5.2), one byte a step.

Theory: a Huffman decoder is an automaton whose states are the inner nodes of the code tree. hpack ships its
transitions for half a byte (16 for each of 256 states). Two half steps make a byte step; the result of a byte
step, that is the next state and how many symbols came out, is kept in two flat tables of 64 KiB that are
filled as they are needed. The *length* of a string, all that following a header table needs, then costs two
look-ups for each byte. Strings whose text matters are few (paths, grpc-status) and are decoded by half steps;
the caller caches them.
"""

from __future__ import annotations

from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE

from proxy.relay.events import RelayError

_UNKNOWN = 255
_INVALID = 254
_counts = (
    bytearray(b"\xff") * 65536
)  # symbols that a byte step gives; 255: not computed yet; 254: no such code
_states = bytearray(65536)  # state after the step
_ends = bytearray(65536)  # 1 where a string may end after the step: what is left is valid padding


def length(raw: bytes) -> int:
    """Count the symbols of a coded string.

    Raises:
        RelayError: The string is not valid.
    """
    counts, states = _counts, _states
    total = state = key = 0
    for byte in raw:
        key = state << 8 | byte
        count = counts[key]
        if count >= _INVALID:
            count = _learn(key)
        total += count
        state = states[key]
    if raw and not _ends[key]:
        raise RelayError("cannot read a header: a Huffman string ends inside a symbol")
    return total


def decode(raw: bytes) -> bytes:
    """Decode a coded string.

    Raises:
        RelayError: The string is not valid.
    """
    out = bytearray()
    state, flags = 0, HUFFMAN_COMPLETE
    for byte in raw:
        for half in (byte >> 4, byte & 15):
            state, flags, symbol = HUFFMAN_TABLE[state * 16 + half]
            if flags & HUFFMAN_FAIL:
                raise RelayError("cannot read a header: a Huffman string holds no valid code")
            if flags & HUFFMAN_EMIT_SYMBOL:
                out.append(symbol)
    if not flags & HUFFMAN_COMPLETE:
        raise RelayError("cannot read a header: a Huffman string ends inside a symbol")
    return bytes(out)


def _learn(key: int) -> int:
    """Fill in one byte step; ``key`` is state * 256 + byte."""
    if _counts[key] == _UNKNOWN:
        state, count, flags, failed = key >> 8, 0, 0, False
        for half in (key >> 4 & 15, key & 15):
            state, flags, _ = HUFFMAN_TABLE[state * 16 + half]
            failed = failed or bool(flags & HUFFMAN_FAIL)
            count += bool(flags & HUFFMAN_EMIT_SYMBOL)
        _counts[key] = _INVALID if failed else count
        _states[key] = state
        _ends[key] = flags & HUFFMAN_COMPLETE
    if _counts[key] == _INVALID:
        raise RelayError("cannot read a header: a Huffman string holds no valid code")
    return _counts[key]
