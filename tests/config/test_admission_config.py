"""The section of admission, and the page that explains it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy.config import Config, as_yaml, parse
from proxy.config.admission import AdmissionConfig
from proxy.config.schema import keys
from proxy.model.admission import AdmissionRule, AdmissionRules, BeyondLimit, Namespaces, ResourceStatusMode
from proxy.model.errors import ConfigError
from proxy.model.label_selector import LabelSelector

PAGE = (Path(__file__).parents[2] / "docs/admission.md").read_text()


def test_the_defaults_bound_what_pods_claim() -> None:
    rules = Config().admission.rules
    assert rules == AdmissionRules(
        ResourceStatusMode.BOUNDED,
        Namespaces(("*",)),
        Namespaces(("kube-system",)),
        None,
        None,
        None,
        None,
        None,
        BeyondLimit.REJECT,
        name_others=False,
    )


def test_all_keys_are_read() -> None:
    text = """
admission:
  resourceStatus: ignore
  namespaces: [team-a, "b-*", 007]
  namespaceSelector: {matchLabels: {cpus: exclusive}}
  systemNamespaces: []
  maxCPUsPerPod: 4
  maxCPUsPerNamespace: ""
  maxCPUsPerNode: 0
  sharedFloor: 3
  sharedFloorPerNUMANode: auto
  beyondLimit: share
  nameOthers: true
"""
    section = parse(text, "f").admission
    assert section == AdmissionConfig(
        ResourceStatusMode.IGNORE,
        Namespaces(("team-a", "b-*", "007")),
        LabelSelector((("cpus", "exclusive"),)),
        Namespaces(()),
        4,
        None,
        0,
        3,
        None,
        BeyondLimit.SHARE,
        name_others=True,
    )
    assert parse(as_yaml(Config(admission=section)), "again").admission == section


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("resourceStatus: bound", r"admission.resourceStatus: 'bound' is not bounded, follow or ignore"),
        ("namespaces: team-a", "admission.namespaces: must be a list of namespaces"),
        ("namespaces: [Team]", r"admission.namespaces\[0\]: 'Team' is not a name of a namespace"),
        ("namespaces: ['a,b']", "is not a name of a namespace"),
        ("namespaces: ['[ab]']", "is not a name of a namespace"),
        ("systemNamespaces: [{labels: {}}]", r"systemNamespaces\[0\]: must be the name of a namespace"),
        ("namespaces: [x, ~]", r"namespaces\[1\]: has no value"),
        ("maxCPUsPerPod: -1", "'-1' is not a whole number"),
        ("maxCPUsPerPod: 1.5", "admission.maxCPUsPerPod: must be a whole number"),
        ("maxCPUsPerPod: auto", "'auto' is not a whole number"),
        ("sharedFloor: ''", "'' is not a whole number"),
        ("sharedFloor: 5%", "'5%' is not a whole number"),
        ("sharedFloor: 70000", "70000 is not between 0 and 65536"),
        ("sharedFloors: 1", "unknown key; did you mean admission.sharedFloor"),
        ("beyondLimit: refuse", "'refuse' is not reject or share"),
        ("nameOthers: 1", "must be true or false"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(f"admission:\n  {text}\n", "f")


@pytest.mark.parametrize(
    ("pattern", "namespace", "admits"),
    [
        ("*", "", True),
        ("kube-system", "kube-system", True),
        ("kube-system", "kube-system2", False),
        ("kube-system", "KUBE-SYSTEM", False),
        ("team-*", "team-", True),
        ("team-*", "my-team-a", False),
        ("team-?", "team-a", True),
        ("team-?", "team-ab", False),
        ("*-prod", "shop-prod", True),
        ("a.b", "axb", False),
    ],
)
def test_patterns_of_namespaces(pattern: str, namespace: str, admits: bool) -> None:
    assert Namespaces((pattern,)).admits(namespace) is admits
    assert Namespaces(("other", pattern)).admits(namespace) is admits
    assert not Namespaces(()).admits(namespace)


def test_the_page_names_every_key_and_every_reason() -> None:
    table = re.findall(r"^\| `(\w+)` \|", PAGE, re.M)
    assert table[: len(list(keys(AdmissionConfig)))] == [key for _, key, _ in keys(AdmissionConfig)]
    assert set(re.findall(r"`(Admission\w+)`", PAGE)) == {rule.reason for rule in AdmissionRule}


def test_the_examples_of_the_page_are_configurations() -> None:
    examples = [parse(body, "the page") for body in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)]
    assert len(examples) == 3
    assert examples[2].admission.rules == AdmissionRules(), "the behaviour before this section existed"
    assert examples[2].hooks.skip_namespaces.all
