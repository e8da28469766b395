"""Defects: what is wrong with input from a user, a scheduler or an operator."""

from __future__ import annotations

import enum
from typing import Self


class DefectKind(enum.StrEnum):
    """Kinds of defective input, and of preferences that cannot be met."""

    QOS_CLASS = "qos-class"
    ANNOTATION = "annotation"
    POLICY = "policy"
    CPU_LIST = "cpu-list"
    OVERLAP = "overlap"
    WISH = "wish"
    ADMISSION = "admission"


class InputDefect(str):
    """One defect of an input: a sentence of the form ``<subject>: <cause>`` that knows its kind.

    Attributes:
        kind: What is defective.
        decisive: Whether this defect leaves its pod without exclusive CPUs; at most one defect of a pod does.
    """

    __slots__ = ("decisive", "kind")
    kind: DefectKind
    decisive: bool

    def __new__(
        cls, message: str, kind: DefectKind = DefectKind.ANNOTATION, *, decisive: bool = False
    ) -> Self:
        """Make a defect of a sentence."""
        defect = super().__new__(cls, message)
        defect.kind, defect.decisive = kind, decisive
        return defect

    def as_decisive(self, *, decisive: bool = True) -> Self:
        """Return the same defect as one that leaves its pod without CPUs of its own, or does not."""
        return type(self)(self, self.kind, decisive=decisive)
