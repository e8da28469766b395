"""The section ``enforce``."""

from __future__ import annotations

import pytest

from proxy.config import Config, as_yaml, parse
from proxy.config.admission import EnforceConfig
from proxy.model.admission import Namespaces
from proxy.model.errors import ConfigError
from proxy.model.label_selector import LabelExpression, LabelOperator, LabelSelector
from proxy.model.pod_selection import ALL_PODS, PodSelection


def test_by_default_all_pods_are_selected_and_moved_one_by_one() -> None:
    section = Config().enforce
    assert section.selection == ALL_PODS
    assert section.selection.all
    assert (section.pods_per_step, section.step_period) == (1, 1.0)


def test_all_keys_are_read() -> None:
    text = """
enforce:
  namespaces: [team-a, "b-*"]
  podSelector:
    matchLabels: {example.com/tier: test, on: 1}
    matchExpressions:
      - {key: app, operator: NotIn, values: [db, "no", db]}
      - {key: canary, operator: Exists}
  percent: 25
  podsPerStep: 3
  stepPeriod: 2s
"""
    section = parse(text, "f").enforce
    selector = LabelSelector(
        (("example.com/tier", "test"), ("on", "1")),
        (
            LabelExpression("app", LabelOperator.NOT_IN, ("db", "no")),
            LabelExpression("canary", LabelOperator.EXISTS),
        ),
    )
    assert section == EnforceConfig(Namespaces(("team-a", "b-*")), selector, 25, 3, 2.0)
    assert section.selection == PodSelection(Namespaces(("team-a", "b-*")), selector, 25)
    assert parse(as_yaml(Config(enforce=section)), "again").enforce == section


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("percent: 101", "101 is not between 0 and 100"),
        ("percent: 50%", "enforce.percent: must be a whole number, 0 to 100"),
        ("podsPerStep: 0", "0 is not between 1 and 1000"),
        ("stepPeriod: 1", "has no unit"),
        ("podSelector: [a]", "must be matchLabels and matchExpressions, as in Kubernetes, not a list"),
        ("podSelector: {matchLabel: {a: b}}", "unknown key; did you mean matchLabels"),
        ("podSelector: {matchLabels: {-a: b}}", "'-a' is not a key of a label"),
        ("podSelector: {matchLabels: {a/b/c: b}}", "'a/b/c' is not a key of a label"),
        ("podSelector: {matchLabels: {a: 'b c'}}", "'b c' is not a value of a label"),
        ("podSelector: {matchLabels: {a: ~}}", "has no value"),
        ("podSelector: {matchExpressions: [{key: a}]}", "operator is missing"),
        ("podSelector: {matchExpressions: [{operator: Exists}]}", "key is missing"),
        ("podSelector: {matchExpressions: [{key: a, operator: in, values: [b]}]}", "did you mean In"),
        ("podSelector: {matchExpressions: [{key: a, operator: In}]}", "In needs values"),
        (
            "podSelector: {matchExpressions: [{key: a, operator: Exists, values: [b]}]}",
            "Exists takes no values",
        ),
        (
            "podSelector: {matchExpressions: [{key: a, operator: In, value: b}]}",
            "unknown key; did you mean values",
        ),
    ],
)
def test_invalid_settings_are_refused_with_their_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(f"enforce:\n  {text}\n", "f")
    assert message in str(error.value)
    assert "enforce." in str(error.value)
