"""Which pods the plan is applied to, as values: namespaces, a label selector, and a percentage of the pods.

A pod is selected if all three select it. A value made without arguments selects all pods.

The percentage is stable. Each pod has a number from 0 to 99, which the hash of its UID gives, and the pods
with a number below the percentage are selected. So a restart selects the same pods, and a larger percentage
only adds pods. On nodes with few pods the share is rarely exact.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping

from msgspec import Struct

from proxy.model.admission import EVERYWHERE, Namespaces
from proxy.model.label_selector import (
    LONGEST_KEY,
    LONGEST_VALUE,
    LabelExpression,
    LabelOperator,
    Labels,
    LabelSelector,
)

MOST_LABELS = 100
"""Labels of a pod that are kept; those that sort behind them are ignored."""
_OWN = "io.kubernetes."
"""kubelet's own labels of a sandbox (kubernetes v1.36 pkg/kubelet/types/labels.go); they are ignored."""


def selectable_labels(labels: Mapping[str, str]) -> Labels:
    """Return the labels of a sandbox that selectors see: the valid labels of its pod."""
    if not labels:
        return ()
    candidates = sorted(
        (key, value)
        for key, value in labels.items()
        if len(key) <= LONGEST_KEY and len(value) <= LONGEST_VALUE and not key.startswith(_OWN)
    )
    return tuple(label for label in candidates[:MOST_LABELS] if label[0].isascii() and label[1].isascii())


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
        """Whether every pod is selected."""
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
                {
                    "key": expression.key,
                    "operator": expression.operator.value,
                    "values": list(expression.values),
                }
                for expression in self.labels.match_expressions
            ],
            "percent": self.percent,
        }

    @classmethod
    def load(cls, data: Mapping[str, object]) -> PodSelection:
        """Return rules from plain data.

        Raises:
            ValueError: The data does not hold such rules.
        """
        names, labels, raw_expressions, percent = (
            data.get(name) for name in ("namespaces", "matchLabels", "matchExpressions", "percent")
        )
        is_number = isinstance(percent, int) and not isinstance(percent, bool)
        if not (
            is_number
            and isinstance(names, list)
            and isinstance(labels, dict)
            and isinstance(raw_expressions, list)
        ):
            raise ValueError("these are not rules of enforce")
        assert isinstance(percent, int)
        try:
            expressions = tuple(
                LabelExpression(
                    str(expression["key"]),
                    LabelOperator(expression["operator"]),
                    tuple(map(str, expression["values"])),
                )
                for expression in raw_expressions
            )
        except (TypeError, KeyError) as error:
            raise ValueError("a label expression is invalid") from error
        match_labels = tuple(sorted((str(key), str(value)) for key, value in labels.items()))
        return cls(Namespaces(tuple(map(str, names))), LabelSelector(match_labels, expressions), percent)


ALL_PODS = PodSelection()
"""Selects every pod."""


@functools.lru_cache(maxsize=4096)
def number_of(key: str) -> int:
    """Return the number of a pod, 0 to 99, by the hash of its identity."""
    digest = hashlib.sha256(key.encode("utf-8", "backslashreplace")).digest()
    return int.from_bytes(digest[:8]) * 100 >> 64
