"""The fields of admission policies, and a check of objects against them.

Derived from the Go types of ``k8s.io/api`` 0.36 (``admissionregistration/v1/types.go``) and from the
validation in ``k8s.io/kubernetes/pkg/apis/admissionregistration/validation``. A field is given by its kind;
the server refuses an object without a field that is marked by ``!``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

GROUP = "admissionregistration.k8s.io/v1"
META = {"name": "text!", "labels": "texts", "annotations": "texts"}
SELECTOR = {"matchLabels": "texts", "matchExpressions": "any"}
RULE = {
    "apiGroups": "list of text!",
    "apiVersions": "list of text!",
    "operations": "list of * CREATE UPDATE DELETE CONNECT!",
    "resources": "list of text!",
    "resourceNames": "list of text",
    "scope": "one of * Cluster Namespaced",
}
MATCH = {
    "namespaceSelector": SELECTOR,
    "objectSelector": SELECTOR,
    "resourceRules": [RULE],
    "excludeResourceRules": [RULE],
    "matchPolicy": "one of Exact Equivalent",
}
NAMED = {"name": "name!", "expression": "text!"}
POLICY = {
    "paramKind": {"apiVersion": "text!", "kind": "text!"},
    "matchConstraints": MATCH,
    "validations": [
        {
            "expression": "text!",
            "message": "line",
            "messageExpression": "text",
            "reason": "one of Unauthorized Forbidden Invalid RequestEntityTooLarge",
        }
    ],
    "failurePolicy": "one of Fail Ignore",
    "auditAnnotations": [{"key": "name!", "valueExpression": "text!"}],
    "matchConditions": [NAMED],
    "variables": [{"name": "identifier!", "expression": "text!"}],
}
BINDING = {
    "policyName": "text!",
    "paramRef": {
        "name": "text",
        "namespace": "text",
        "selector": SELECTOR,
        "parameterNotFoundAction": "one of Allow Deny",
    },
    "matchResources": MATCH,
    "validationActions": "list of Deny Warn Audit!",
}
SPECS: Mapping[str, Mapping[str, Any]] = {
    "ValidatingAdmissionPolicy": POLICY,
    "ValidatingAdmissionPolicyBinding": BINDING,
}
PATTERNS = {
    "text": re.compile(r"(?s).+"),
    "line": re.compile(r"[^\n\r]+"),
    "name": re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"),
    "identifier": re.compile(r"[_a-zA-Z][_a-zA-Z0-9]*"),
}


def faults(item: Mapping[str, Any]) -> list[str]:
    """Return the reasons for which the API server would refuse an object, one sentence each."""
    spec = SPECS.get(str(item.get("kind")))
    if item.get("apiVersion") != GROUP or spec is None:
        return [f"{item.get('apiVersion')} {item.get('kind')} is not known"]
    fields = {"apiVersion": "text!", "kind": "text!", "metadata": META, "spec": spec}
    found = list(_object(item, fields, ""))
    content = item.get("spec", {})
    if item["kind"] == "ValidatingAdmissionPolicy":
        if not content.get("matchConstraints", {}).get("resourceRules"):
            found.append("spec.matchConstraints.resourceRules is missing")
        if not content.get("validations") and not content.get("auditAnnotations"):
            found.append("spec has neither validations nor auditAnnotations")
        for key in ("variables", "matchConditions"):
            names = [each.get("name") for each in content.get(key, ())]
            found += [
                f"spec.{key}: {name} is there twice" for name in {n for n in names if names.count(n) > 1}
            ]
    return found


def _object(item: Any, fields: Mapping[str, Any], at: str) -> Iterator[str]:
    if not isinstance(item, Mapping):
        yield f"{at} is no object"
        return
    for name in item.keys() - fields.keys():
        yield f"{at}.{name} is unknown".lstrip(".")
    for name, kind in fields.items():
        where = f"{at}.{name}".lstrip(".")
        if name in item:
            yield from _value(item[name], kind, where)
        elif isinstance(kind, str) and kind.endswith("!"):
            yield f"{where} is missing"


def _value(value: Any, kind: Any, at: str) -> Iterator[str]:
    if isinstance(kind, Mapping):
        yield from _object(value, kind, at)
    elif isinstance(kind, list):
        if not isinstance(value, list):
            yield f"{at} is no list"
            return
        for number, each in enumerate(value):
            yield from _object(each, kind[0], f"{at}[{number}]")
    elif kind == "texts":
        if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
            yield f"{at} is no map of texts"
    elif kind != "any":
        yield from _plain(value, kind.removesuffix("!"), at)


def _plain(value: Any, kind: str, at: str) -> Iterator[str]:
    if kind.startswith("list of "):
        wants = kind.removeprefix("list of ")
        if not isinstance(value, list) or not value:
            yield f"{at} is no list, or an empty one"
            return
        for each in value:
            yield from _plain(each, wants if wants == "text" else f"one of {wants}", at)
        if len(set(map(str, value))) < len(value):
            yield f"{at} names something twice"
    elif kind.startswith("one of "):
        if value not in kind.removeprefix("one of ").split():
            yield f"{at}: {value!r} is none of {kind.removeprefix('one of ')}"
    elif not isinstance(value, str) or (
        at.rpartition(".")[2] != "apiGroups" and not PATTERNS[kind].fullmatch(value)
    ):
        yield f"{at}: {value!r} is no {kind}"
