"""Kubernetes' amounts of a resource: ``1Gi``, ``500m``, ``2``, ``1e3``, ``0.5`` (its resource.Quantity).

Theory. An amount is a decimal number with one suffix: a decimal one (n u m k M G T P E), a binary one (Ki to
Ei), or an exponent of ten (e3, E-3). ``E`` alone is 10^18, with a number behind it the exponent. The
computation uses integers, so it is exact; a result that is no whole number is rounded away from zero, and one
that an int64 cannot hold becomes the largest int64, as in Kubernetes.
"""

from __future__ import annotations

import functools
import re

from proxy.model.quoting import quoted, shown

LARGEST = (1 << 63) - 1
"""The largest amount."""

# Compiled on first use: most commands read no amount.
_NUMBER = r"(?s)([+-]?)(?:([0-9]+)(?:\.([0-9]*))?|\.([0-9]+))(.*)"
_EXPONENT = r"[eE]([+-]?[0-9]+)"
_TENS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY_SUFFIXES = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_LONGEST = 100
_FAR = 3 * _LONGEST
"""An exponent beyond this changes no result: a text of 100 characters is then below 1 or above LARGEST."""


def parse_quantity(value: object, *, milli: bool = False) -> int:
    """Read an amount.

    Args:
        value: The text, or the number that a YAML or JSON file has instead; anything else is an error.
        milli: Count in thousandths, as CPU is counted.

    Returns:
        The amount, rounded away from zero; negative if the text is.

    Raises:
        ValueError: The value is no amount; the message has the reason.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{shown(value)} is not an amount")  # noqa: TRY004 - one error for all bad input
    text = value if isinstance(value, str) else repr(value)
    if len(text) > _LONGEST:
        raise ValueError(f"{quoted(text, 20)} is too long for an amount")
    return _parse(text, 3 if milli else 0)


@functools.lru_cache(maxsize=1024)
def _parse(text: str, shift: int) -> int:
    """Read an amount, and multiply it by ten to the power of ``shift``."""
    match = _number().fullmatch(text)
    if match is None:
        raise ValueError(f"{quoted(text)} is not an amount such as 2, 500m or 1Gi")
    sign, whole, part, bare, suffix = match.groups(default="")
    part = part or bare
    tens, twos = _scale(text, suffix)
    size = _round_up(int(whole + part) << twos, tens - len(part) + shift)
    return -size if sign == "-" else size


@functools.cache
def _number() -> re.Pattern[str]:
    return re.compile(_NUMBER)


def show_quantity(amount: int, *, milli: bool = False) -> str:
    """Return the shortest text of an amount (in thousandths if ``milli``) that reads back the same."""
    if milli:
        return str(amount // 1000) if amount % 1000 == 0 else f"{amount}m"
    for suffix, twos in reversed(_BINARY_SUFFIXES.items()):
        if amount and amount % (1 << twos) == 0:
            return f"{amount >> twos}{suffix}"
    return str(amount)


def _scale(text: str, suffix: str) -> tuple[int, int]:
    """Return the powers of ten and of two that a suffix means."""
    if suffix in _TENS:
        return _TENS[suffix], 0
    if suffix in _BINARY_SUFFIXES:
        return 0, _BINARY_SUFFIXES[suffix]
    if exponent := re.fullmatch(_EXPONENT, suffix):
        return max(-_FAR, min(_FAR, int(exponent[1]))), 0
    near = {name.lower(): name for name in (*_BINARY_SUFFIXES, *_TENS)}.get(suffix.lower())
    hint = (
        f"; did you mean {near}?"
        if near
        else f" (known: {' '.join(s for s in (*_TENS, *_BINARY_SUFFIXES) if s)})"
    )
    raise ValueError(f"{quoted(text)} is not an amount: {quoted(suffix)} is not a suffix{hint}")


def _round_up(size: int, tens: int) -> int:
    power: int = 10 ** abs(tens)
    return min(size * power if tens >= 0 else -(-size // power), LARGEST)
