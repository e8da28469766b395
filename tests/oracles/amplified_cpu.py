"""Amplification: a node that reports more CPUs than it has.

Source: koordinator a7a1b76, apis/extension ``Amplify``. With a ratio above 1 a node offers its CPUs ``ratio``
times, for pods that share them. A pod that binds CPUs takes them away from all those shares, so for fitting
it counts ``ratio`` times; its CPUs and its part of each NUMA node are counted as requested.

All rounding is up, to a thousandth of a CPU. A ratio is a decimal number, and is taken as it is written: with
Koordinator's binary fractions 1.1 times 3000 is 3301.
"""

from __future__ import annotations

import math
from fractions import Fraction

Ratio = float | str
"""How many times; 1 and less change nothing."""


def amplified(milli: int, ratio: Ratio) -> int:
    """Return an amount of CPU times a ratio.

    Args:
        milli: Thousandths of a CPU.
        ratio: The ratio.

    Raises:
        ValueError: The ratio is not a number.
    """
    exact = _exact(ratio)
    return math.ceil(milli * exact) if exact > 1 else milli


def counted_request(milli: int, ratio: Ratio, *, bound: bool) -> int:
    """Return what a pod's CPU request counts on a node with amplified CPUs; arguments as ``amplified``."""
    return amplified(milli, ratio) if bound else milli


def counted_usage(requested: int, bound: int, ratio: Ratio) -> int:
    """Return what counts as used on such a node.

    Args:
        requested: Requests of all its pods, in thousandths.
        bound: Number of CPUs that are bound.
        ratio: The ratio.
    """
    return requested - bound * 1000 + amplified(bound * 1000, ratio)


def _exact(ratio: Ratio) -> Fraction:
    try:
        return Fraction(str(ratio))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"cannot amplify CPUs: {ratio!r} is no ratio") from None
