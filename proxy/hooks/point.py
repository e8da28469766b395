"""What all hook points have in common, and where they are all found."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Final


@dataclass(frozen=True, slots=True)
class Point:
    """A point in the way of a call where hooks are asked.

    Attributes:
        TAKES: Fields of an adjustment that can be changed here.
        VETO: A hook may refuse the call.
    """

    TAKES: ClassVar[frozenset[str]] = frozenset()
    VETO: ClassVar[bool] = False
    NAME: ClassVar[str] = "point"

    def __init_subclass__(cls) -> None:
        """Name the handlers of a point and remember it."""
        cls.NAME = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        POINTS[cls.NAME] = cls  # with slots a class is made twice: the second one stays


POINTS: Final[dict[str, type[Point]]] = {}
"""All points by their handlers' name."""
