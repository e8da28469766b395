"""Tracking only as much of an HPACK table as one field needs (RFC 7541).

Theory: a header block is a program for the receiver's dynamic table. To understand an index in a later block,
a reader must have executed every earlier block of the same direction. But to find *one* field it is enough to
know of each entry its size (eviction goes by size), the length of its name (a later entry may refer to it)
and, if it has the wanted name, its value. So names and values are not built. Literals are skipped, and their
decoded lengths are counted if they enter the table. Text is decoded only for the wanted field, through a
cache, and only up to a length above that of any value that matters, because decoding is slow. A block of a
known call is eight to ten indexed bytes and costs less than a microsecond.

The tracker must see all blocks from the first one of a connection; a session always begins there.

Most answers change nothing in the table. Whether a block changes it depends only on the block's bytes, not on
the table. ``skip_block`` remembers the blocks that change nothing, and skips them without reading them.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from proxy.relay import huffman
from proxy.relay.events import ENHANCE_YOUR_CALM, RelayError

DEFAULT_TABLE_SIZE: Final = 4096
MAX_TABLE_SIZE: Final = 1 << 20
"""More than any client uses (64 KiB); the bound keeps a hostile peer from filling memory."""
_ENTRY_OVERHEAD: Final = 32
_STATIC: Final = 61
# Lengths of the names of the static table (RFC 7541, appendix A), by index.
_NAME_LENGTHS: Final = (
    *(0, 10, 7, 7, 5, 5, 7, 7, 7, 7, 7, 7, 7, 7, 7, 14, 15, 15, 13, 6, 27, 3, 5, 13, 13, 19, 16, 16, 14),
    *(16, 13, 12, 6, 4, 4, 6, 7, 4, 4, 8, 17, 13, 8, 19, 13, 4, 8, 12, 18, 19, 5, 7, 7, 11, 6, 10, 25),
    *(17, 10, 4, 3, 16),
)
_CACHE_ENTRIES: Final = 512
_CACHED_BYTES: Final = 256
LONGEST_TEXT: Final = 1024
"""Coded bytes of a value that is decoded; paths of methods and results of calls have less than 100."""
_TEXTS_IN_A_BLOCK: Final = 8  # a valid block has one
_TOO_LONG: Final = "?"  # in place of a longer value; it is neither a path nor a number


class HpackTracker:
    """Follows one direction's header table and finds one field.

    Attributes:
        size: Table size that the sender chose last, in bytes as HPACK counts them.
        cap: The largest size that the sender may choose.
        changes: Counts changes of the table.
    """

    __slots__ = (
        "_decoded", "_inert", "_static", "_table", "_texts", "_used", "_wanted", "cap", "changes", "size",
    )  # fmt: skip

    def __init__(self, wanted: bytes, static: dict[int, str]) -> None:
        """Start at the beginning of a connection.

        Args:
            wanted: Name of the field to find.
            static: Its values in the static table, by index.
        """
        self._wanted = wanted
        self._static = {0x80 | index: value for index, value in static.items()}
        self._table: deque[tuple[int, int, str | None]] = deque()  # size, length of name, value if wanted
        self._used = 0
        self._texts: dict[bytes, str] = {}
        self._decoded = 0
        self._inert: set[bytes] = set()
        self.size = DEFAULT_TABLE_SIZE
        self.cap = DEFAULT_TABLE_SIZE
        self.changes = 0

    def allow(self, size: int) -> None:
        """Record that the receiver announced SETTINGS_HEADER_TABLE_SIZE ``size``."""
        self.cap = max(self.cap, min(size, MAX_TABLE_SIZE))

    def skip_block(self, block: bytes) -> None:
        """Follow a block whose fields are not needed.

        Raises:
            RelayError: The block is not valid.
        """
        if block in self._inert:
            return
        before = self.changes
        self.feed(block)
        if self.changes == before and len(block) <= _CACHED_BYTES and len(self._inert) < _CACHE_ENTRIES:
            self._inert.add(block)

    def feed(self, block: bytes) -> str | None:
        """Follow a complete header block.

        Returns:
            The value of the wanted field, or None if the block does not contain it.

        Raises:
            RelayError: The block is not valid.
        """
        found: str | None = None
        self._decoded = 0
        table, static = self._table, self._static
        pos, end = 0, len(block)
        fresh = True
        try:
            while pos < end:
                byte = block[pos]
                pos += 1
                if byte > 0xBD:  # indexed, dynamic table
                    if byte == 0xFF:
                        if block[pos] < 0x80:
                            byte += block[pos]
                            pos += 1
                        else:
                            byte, pos = _integer(block, pos, 0xFF)
                    if found is None:
                        found = table[0xBD - byte][2]
                elif byte > 0x80:  # indexed, static table
                    if byte in static:
                        found = static[byte]
                elif byte & 0xE0 != 0x20 and byte != 0x80:
                    pos, value = self._literal(block, pos, byte)
                    if value is not None:
                        found = value
                else:
                    pos = self._resize(block, pos, byte, fresh)
                    continue
                fresh = False
        except IndexError:
            raise RelayError("cannot read a header: it is cut short or names no table entry") from None
        return found

    def _resize(self, block: bytes, pos: int, byte: int, fresh: bool) -> int:
        size = byte & 0x1F
        if size == 0x1F:
            size, pos = _integer(block, pos, 0x1F)
        if not fresh or byte == 0x80 or size > self.cap:
            raise RelayError(
                f"cannot follow the header table: size {size} is not allowed here (at most {self.cap})"
            )
        self.size = size
        self.changes += 1
        self._evict()
        return pos

    def _literal(self, block: bytes, pos: int, byte: int) -> tuple[int, str | None]:
        """Skip a literal field; return the position behind it and, if it is the wanted one, its value."""
        keep = byte & 0x40
        mask = 0x3F if keep else 0x0F
        index = byte & mask
        if index == mask:
            index, pos = _integer(block, pos, mask)
        if index > _STATIC:
            _, name_length, known = self._table[_STATIC - index]
            wanted = known is not None
        elif index:
            name_length, wanted = _NAME_LENGTHS[index], index | 0x80 in self._static
        else:
            coded, pos, end = _string(block, pos)
            name_length, wanted = self._name(block[pos:end], coded)
            pos = end
        coded, pos, end = _string(block, pos)
        value = self._text(block[pos:end], coded) if wanted else None
        if keep:
            size = huffman.length(block[pos:end]) if coded else end - pos
            size += name_length + _ENTRY_OVERHEAD
            self.changes += 1
            self._used += size
            self._table.append((size, name_length, value))
            if self._used > self.size:
                self._evict()
        return end, value

    def _name(self, raw: bytes, coded: int) -> tuple[int, bool]:
        """Return the length of a name, and whether it is the wanted one."""
        if not coded:
            return len(raw), raw == self._wanted
        if len(raw) > len(self._wanted):  # no code of a letter is longer than the letter
            return huffman.length(raw), False
        name = huffman.decode(raw)
        return len(name), name == self._wanted

    def _evict(self) -> None:
        table = self._table
        while self._used > self.size:
            self._used -= table.popleft()[0]

    def _text(self, raw: bytes, coded: int) -> str:
        if not coded:
            return raw.decode("latin-1")
        text = self._texts.get(raw)
        if text is None:
            if len(raw) > LONGEST_TEXT:
                return _TOO_LONG
            self._decoded += 1
            if self._decoded > _TEXTS_IN_A_BLOCK:
                raise RelayError("cannot read a header: it repeats one field too often", ENHANCE_YOUR_CALM)
            text = huffman.decode(raw).decode("latin-1")
            if len(raw) <= _CACHED_BYTES:
                if len(self._texts) >= _CACHE_ENTRIES:
                    self._texts.clear()
                self._texts[raw] = text
        return text


def _string(block: bytes, pos: int) -> tuple[int, int, int]:
    """Read a string's head; return whether it is Huffman coded, where it begins and where it ends."""
    byte = block[pos]
    pos += 1
    size = byte & 0x7F
    if size == 0x7F:
        size, pos = _integer(block, pos, 0x7F)
    if pos + size > len(block):
        raise RelayError("cannot read a header: it is cut short")
    return byte & 0x80, pos, pos + size


def _integer(block: bytes, pos: int, value: int) -> tuple[int, int]:
    """Read the rest of an integer whose prefix is full (RFC 7541, 5.1)."""
    for shift in range(0, 28, 7):
        byte = block[pos]
        pos += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos
    raise RelayError("cannot read a header: an integer is too large")
