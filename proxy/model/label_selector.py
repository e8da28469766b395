"""A selector of labels, with the meaning that Kubernetes gives it.

See kubernetes v1.36 staging/src/k8s.io/apimachinery/pkg/labels/selector.go, Requirement.Matches: all of
``matchLabels`` and ``matchExpressions`` must hold, and ``NotIn`` also holds without the label.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from msgspec import Struct

Labels = tuple[tuple[str, str], ...]
"""Labels of an object, sorted by key."""
LONGEST_KEY, LONGEST_VALUE = 253 + 1 + 63, 63
"""Characters of a label, as the API server allows them."""


class LabelOperator(enum.StrEnum):
    """How an expression compares a label; the words are Kubernetes'."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class LabelExpression(Struct, frozen=True):
    """One of ``matchExpressions``.

    Attributes:
        key: The label.
        operator: How it is compared.
        values: The values to compare with; empty for ``Exists`` and ``DoesNotExist``.
    """

    key: str
    operator: LabelOperator
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether the expression holds for labels."""
        match self.operator:
            case LabelOperator.IN:
                return labels.get(self.key) in self.values
            case LabelOperator.NOT_IN:
                return labels.get(self.key) not in self.values
            case LabelOperator.EXISTS:
                return self.key in labels
            case LabelOperator.DOES_NOT_EXIST:
                return self.key not in labels


class LabelSelector(Struct, frozen=True):
    """A selector of labels; an empty one selects all.

    Attributes:
        match_labels: Labels with the values that they must have.
        match_expressions: Expressions that must hold in addition.
    """

    match_labels: Labels = ()
    match_expressions: tuple[LabelExpression, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether the selector selects labels."""
        return all(labels.get(key) == value for key, value in self.match_labels) and all(
            each.matches(labels) for each in self.match_expressions
        )

    @property
    def all(self) -> bool:
        """Whether it selects all labels."""
        return not self.match_labels and not self.match_expressions
