"""Huffman coded header strings (RFC 7541, 5.2), one byte per step.

Theory: a Huffman decoder is an automaton whose states are the inner nodes of the code tree. hpack ships its
transitions for half a byte (16 for each of 256 states). Two half steps make a byte step: the next state, how
many symbols came out, and whether a string may end there. The byte steps of one state make a row of 256. A
row is built when a string first reaches its state, and steps point to rows, so that following a string takes
one look-up for each byte. To follow a header table only the *length* of a string is needed. Strings whose
text matters are few (paths, grpc-status) and are decoded by half steps; the caller caches them.

In hpack the transitions are thousands of tuples, 0.3 MB; here each is one number.
"""

from __future__ import annotations

from array import array

from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE

from proxy.relay.events import RelayError

_HALVES = array("L", (state << 16 | flags << 8 | symbol for state, flags, symbol in HUFFMAN_TABLE))
"""By state and half a byte: the next state, flags, and the symbol that comes out, if one does."""
del HUFFMAN_TABLE

Row = list["Step | None"]  # by byte; None: no such code; empty: not built yet
Step = tuple[Row, int, bool]  # next row, symbols, whether the remaining bits are valid padding

_rows: list[Row] = [[] for _ in range(256)]
_states = {id(row): state for state, row in enumerate(_rows)}
_steps: dict[tuple[int, int, bool], Step] = {}  # equal steps are one object


def length(raw: bytes) -> int:
    """Count the symbols of a coded string.

    Raises:
        RelayError: The string is not valid.
    """
    total = 0
    row, ends = _rows[0], True
    for byte in raw:
        step = row[byte] if row else _build(row)[byte]
        if step is None:
            raise RelayError("cannot read a header: a Huffman string holds no valid code")
        row, count, ends = step
        total += count
    if not ends:
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
            step = _HALVES[state * 16 + half]
            state, flags = step >> 16, step >> 8 & 0xFF
            if flags & HUFFMAN_FAIL:
                raise RelayError("cannot read a header: a Huffman string holds no valid code")
            if flags & HUFFMAN_EMIT_SYMBOL:
                out.append(step & 0xFF)
    if not flags & HUFFMAN_COMPLETE:
        raise RelayError("cannot read a header: a Huffman string ends inside a symbol")
    return bytes(out)


def _build(row: Row) -> Row:
    start = _states[id(row)] * 16
    for byte in range(256):
        half = _HALVES[start + (byte >> 4)]
        whole = _HALVES[(half >> 16) * 16 + (byte & 15)]
        state, first, second = whole >> 16, half >> 8, whole >> 8
        if (first | second) & HUFFMAN_FAIL:
            row.append(None)
        else:
            count = bool(first & HUFFMAN_EMIT_SYMBOL) + bool(second & HUFFMAN_EMIT_SYMBOL)
            key = state, count, bool(second & HUFFMAN_COMPLETE)
            row.append(_steps.setdefault(key, (_rows[state], count, key[2])))
    return row
