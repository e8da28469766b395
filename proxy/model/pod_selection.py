"""Which pods the plan is applied to, as values: namespaces, a label selector, and a percentage of the pods.

A pod is selected that all three select. A value made without arguments selects all pods.

The label selector has the meaning that Kubernetes gives it (kubernetes v1.36
staging/src/k8s.io/apimachinery/pkg/labels/selector.go, Requirement.Matches): all of ``matchLabels`` and
``matchExpressions`` must hold, and ``NotIn`` also holds for a pod without the label.

The percentage is stable. Each pod has a number from 0 to 99, which the hash of its UID gives, and the pods
with a number below the percentage are selected. So a restart selects the same pods, and a larger percentage
only adds pods. On nodes with few pods the share is rarely exact.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections.abc import Mapping

from msgspec import Struct

from proxy.model.admission import EVERYWHERE, Namespaces

Labels = tuple[tuple[str, str], ...]
"""The labels of a pod, sorted by key."""
MOST_LABELS = 100
"""Labels of a pod that are kept; those that sort behind them are ignored."""
LONGEST_KEY, LONGEST_VALUE = 253 + 1 + 63, 63
"""Characters of a label, as the API server allows them."""
_OWN = "io.kubernetes."
"""kubelet's own labels of a sandbox (kubernetes v1.36 pkg/kubelet/types/labels.go); they are ignored."""


def kept_labels(labels: Mapping[str, str]) -> Labels:
    """Return the labels of a sandbox that selectors see: those of its pod, as far as they are valid."""
    if not labels:
        return ()
    kept = sorted(
        (key, value)
        for key, value in labels.items()
        if len(key) <= LONGEST_KEY and len(value) <= LONGEST_VALUE and not key.startswith(_OWN)
    )
    return tuple(each for each in kept[:MOST_LABELS] if each[0].isascii() and each[1].isascii())


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
        values: With what; empty for ``Exists`` and ``DoesNotExist``.
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
        match_expressions: What else must hold.
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
        """True where it selects all labels."""
        return not self.match_labels and not self.match_expressions


class PodSelection(Struct, frozen=True):
    """The rules of ``enforce``.

    Attributes:
        namespaces: Namespaces whose pods are selected.
        labels: Labels of the pods that are selected.
        percent: How many of these pods are selected, 0 to 100.
    """

    namespaces: Namespaces = EVERYWHERE
    labels: LabelSelector = LabelSelector()
    percent: int = 100

    @property
    def all(self) -> bool:
        """True where every pod is selected."""
        return self.percent >= 100 and self.labels.all and self.namespaces.all

    def selects(self, key: str, namespace: str, labels: Labels) -> bool:
        """Return whether a pod is selected.

        Args:
            key: Its identity (``Pod.key``).
            namespace: Its namespace.
            labels: Its labels.
        """
        if not self.namespaces.admits(namespace) or not (
            self.percent >= 100 or number_of(key) < self.percent
        ):
            return False
        return self.labels.all or self.labels.matches(dict(labels))

    def dump(self) -> dict[str, object]:
        """Return the rules as plain data."""
        return {
            "namespaces": list(self.namespaces.patterns),
            "matchLabels": dict(self.labels.match_labels),
            "matchExpressions": [
                {"key": each.key, "operator": each.operator.value, "values": list(each.values)}
                for each in self.labels.match_expressions
            ],
            "percent": self.percent,
        }

    @classmethod
    def load(cls, data: Mapping[str, object]) -> PodSelection:
        """Return rules from plain data.

        Raises:
            ValueError: It does not hold such rules.
        """
        names, labels, rest, percent = (
            data.get(name) for name in ("namespaces", "matchLabels", "matchExpressions", "percent")
        )
        is_number = isinstance(percent, int) and not isinstance(percent, bool)
        if not (
            is_number and isinstance(names, list) and isinstance(labels, dict) and isinstance(rest, list)
        ):
            raise ValueError("these are not rules of enforce")
        assert isinstance(percent, int)
        try:
            expressions = tuple(
                LabelExpression(
                    str(each["key"]), LabelOperator(each["operator"]), tuple(map(str, each["values"]))
                )
                for each in rest
            )
        except (TypeError, KeyError) as error:
            raise ValueError("an expression of labels is none") from error
        match_labels = tuple(sorted((str(key), str(value)) for key, value in labels.items()))
        return cls(Namespaces(tuple(map(str, names))), LabelSelector(match_labels, expressions), percent)


ALL_PODS = PodSelection()
"""Selects every pod."""


@functools.lru_cache(maxsize=4096)
def number_of(key: str) -> int:
    """Return the number of a pod, 0 to 99, by the hash of its identity."""
    digest = hashlib.sha256(key.encode("utf-8", "backslashreplace")).digest()
    return int.from_bytes(digest[:8]) * 100 >> 64
