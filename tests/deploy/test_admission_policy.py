"""deploy/validating-admission-policy.yaml: the API's schema accepts it, and its decisions are correct."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.schema import faults

HERE = Path(__file__).parent
FILE = HERE.parents[1] / "deploy/validating-admission-policy.yaml"
KEY = "scheduling.koordinator.sh/resource-status"
SCHEDULER = "system:serviceaccount:koordinator-system:koord-scheduler"
MIRROR = {"kubernetes.io/config.mirror": "abc"}
CPUS, OTHERS = {KEY: '{"cpuset":"0-3"}'}, {KEY: '{"cpuset":"0-30"}'}


POLICY, BINDING = yaml.safe_load_all(FILE.read_text())


def test_the_schema_accepts_both_objects() -> None:
    assert faults(POLICY) == []
    assert faults(BINDING) == []
    assert BINDING["spec"]["policyName"] == POLICY["metadata"]["name"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("apiVersion",), "admissionregistration.k8s.io/v1alpha1", "is not known"),
        (("spec", "failurPolicy"), "Fail", "spec.failurPolicy is unknown"),
        (("spec", "failurePolicy"), "fail", "spec.failurePolicy: 'fail' is none of Fail Ignore"),
        (("spec", "matchConstraints", "resourceRules"), [], "resourceRules is missing"),
        (("spec", "matchConstraints", "resourceRules", 0, "operations"), ["Create"], "is none of"),
        (("spec", "matchConstraints", "resourceRules", 0, "verbs"), ["create"], "[0].verbs is unknown"),
        (("spec", "variables", 0, "name"), "the-schedulers", "is no identifier"),
        (("spec", "variables", 1, "name"), "schedulers", "schedulers is there twice"),
        (("spec", "validations", 0, "reason"), "Denied", "is none of"),
        (("spec", "validations", 0, "message"), "one\ntwo", "is no line"),
        (("spec", "validations"), [], "neither validations nor"),
        (("metadata",), {}, "metadata.name is missing"),
    ],
)  # fmt: skip
def test_the_schema_reports_what_the_server_would_refuse(
    path: tuple[Any, ...], value: Any, message: str
) -> None:
    changed = copy.deepcopy(POLICY)
    place = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert any(message in fault for fault in faults(changed)), faults(changed)


def test_every_way_to_write_annotations_of_a_pod_is_matched() -> None:
    rules = POLICY["spec"]["matchConstraints"]["resourceRules"]
    ways = {(operation, r) for rule in rules for operation in rule["operations"] for r in rule["resources"]}
    assert ways >= {
        ("CREATE", "pods"),
        ("UPDATE", "pods"),
        ("UPDATE", "pods/status"),
        ("UPDATE", "pods/ephemeralcontainers"),
        ("UPDATE", "pods/resize"),
        ("CREATE", "pods/binding"),
        ("CREATE", "bindings"),
    }


def review(
    before: dict[str, str] | None, after: dict[str, str] | None, user: str = "alice", *groups: str
) -> dict[str, Any]:
    """Return a review: annotations before (None: a create) and after (None: without annotations)."""
    user_info = {"username": user, **({"groups": list(groups)} if groups else {})}
    return {
        "oldObject": None if before is None else {"metadata": {"name": "p", "annotations": before}},
        "object": {"metadata": {"name": "p", **({} if after is None else {"annotations": after})}},
        "request": {"userInfo": user_info},
    }


DENIED = POLICY["spec"]["validations"][0]["message"]
NODE = ("system:node:n1", "system:nodes", "system:authenticated")
CASES = {
    "an author creates a pod with the annotation": (review(None, CPUS), DENIED),
    "an empty annotation is one": (review(None, {KEY: ""}), DENIED),
    "a controller creates it from a template": (
        review(None, CPUS, "system:serviceaccount:kube-system:replicaset-controller"), DENIED,
    ),
    "a pod without annotations": (review(None, None), "allowed"),
    "a pod with others": (review(None, {"a": "b"}), "allowed"),
    "the scheduler sets it": (review({}, CPUS, SCHEDULER), "allowed"),
    "the scheduler changes it": (review(CPUS, OTHERS, SCHEDULER), "allowed"),
    "an account of the same name elsewhere": (
        review({}, CPUS, "system:serviceaccount:tenant-a:koord-scheduler"), DENIED,
    ),
    "an author changes it": (review(CPUS, OTHERS), DENIED),
    "an author adds it": (review({}, CPUS), DENIED),
    "an author removes it": (review(CPUS, {}), DENIED),
    "an author removes all annotations": (review(CPUS, None), DENIED),
    "an author changes something else": (review(CPUS, {**CPUS, "a": "b"}), "allowed"),
    "kubelet reports the status": (review(CPUS, CPUS, *NODE), "allowed"),
    "kubelet changes it": (review(CPUS, OTHERS, *NODE), DENIED),
    "kubelet shows a static pod": (review(None, {**CPUS, **MIRROR}, *NODE), "skipped"),
    "an author takes a pod for a static one": (review(None, {**CPUS, **MIRROR}), DENIED),
    "a binding with annotations": (review(None, CPUS, "mallory"), DENIED),
    "a binding without": (review(None, None, "system:kube-scheduler"), "allowed"),
}  # fmt: skip


@pytest.mark.timeout(600)
def test_the_expressions_admit_and_reject_the_expected_requests(tmp_path: Path) -> None:
    """The expressions are evaluated by cel-go, the library of the API server, from the Go module proxy."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("Go is not installed")
    for name in ("go.mod", "main.go"):
        shutil.copy(HERE / "cel" / name, tmp_path)
    env = {**os.environ, "GOFLAGS": "-mod=mod"}
    made = subprocess.run(
        [go, "build", "-o", "policycheck", "."],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )
    if made.returncode and "cel-go" in made.stderr and "main.go" not in made.stderr:
        pytest.skip(f"cel-go cannot be fetched: {made.stderr.strip().splitlines()[-1]}")
    assert made.returncode == 0, made.stderr
    text = json.dumps({"policy": POLICY, "requests": [request for request, _ in CASES.values()]})
    done = subprocess.run(
        [tmp_path / "policycheck"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    result = dict(zip(CASES, json.loads(done.stdout), strict=True))
    assert result == {name: verdict for name, (_, verdict) in CASES.items()}
