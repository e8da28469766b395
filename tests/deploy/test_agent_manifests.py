"""The agent's manifests: a chart and a kustomization that agree, with only the necessary permissions."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import proxy
from proxy.cli.agent import agent
from proxy.config.load import load
from tests.deploy.charts import render, rendered
from tests.deploy.schema import faults

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/topoproxy-agent"
AGENT = ROOT / "deploy/agent"
SAME: dict[str, Any] = {"release": "topoproxy", "namespace": "topoproxy-system"}
WRONG: list[dict[str, Any]] = [
    {"nodeRestriction": "yes"},
    {"permissions": {"evict": True}},
    {"image": {"repository": ""}},
    {"state": "attached"},
]
EVICTION = {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]}
FAILING = {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}
DELETION = {"apiGroups": [""], "resources": ["pods"], "verbs": ["delete"]}

pytestmark = pytest.mark.timeout(1100)


def key(value: dict[str, Any]) -> tuple[str, str]:
    return value["kind"], value["metadata"]["name"]


def kustomized(directory: Path) -> dict[tuple[str, str], Any]:
    """Return the objects of a kustomization that only lists files."""
    names = yaml.safe_load((directory / "kustomization.yaml").read_text())["resources"]
    values = [each for name in names for each in yaml.safe_load_all((directory / name).read_text())]
    return {key(each): each for each in values}


def bare(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object without labels and the fields that a chart and a kustomization write differently."""
    found: dict[str, Any] = json.loads(json.dumps(value))
    found["metadata"].pop("labels", None)
    found.pop("automountServiceAccountToken", None)
    if found["kind"] == "DaemonSet":
        template = found["spec"]["template"]
        found["spec"].pop("selector")
        template["metadata"].pop("labels")
        pod = template["spec"]
        for name in ("automountServiceAccountToken", "nodeSelector"):
            pod.pop(name, None)
        for name in ("image", "imagePullPolicy"):
            pod["containers"][0].pop(name, None)
    return found


def rules(values: list[dict[str, Any]]) -> list[Any]:
    return [rule for each in values if each["kind"] == "ClusterRole" for rule in each["rules"]]


@pytest.mark.parametrize("file", [AGENT / "daemonset.yaml", CHART / "templates/daemonset.yaml"], ids=str)
def test_the_agent_starts_with_drop_ins_alone(file: Path, tmp_path: Path) -> None:
    (line,) = [line for line in file.read_text().splitlines() if line.strip().startswith("command:")]
    program, name, *options = yaml.safe_load(line)["command"]
    assert (program, name) == ("topoproxy", "agent")
    file_option = agent.make_context(name, options).params["file"]
    assert file_option is None, "a file that is named must exist, and no package or chart writes one"
    (tmp_path / "config.d").mkdir()
    (tmp_path / "config.d/90-helm.yaml").write_text("cluster: {node: n9}\n")
    assert load(file_option, tmp_path / "config.yaml").cluster.node == "n9"


def test_ending_pods_is_a_component_and_no_permission_of_every_agent() -> None:
    base, more = kustomized(AGENT), kustomized(AGENT / "rejected-pods")
    for rule in rules([*base.values()]):
        assert not {"pods/eviction", "pods/status"} & {*rule["resources"]}
        assert "pods" not in rule["resources"] or "delete" not in rule["verbs"]
    assert rules([*more.values()]) == [EVICTION, FAILING]
    component = yaml.safe_load((AGENT / "rejected-pods/kustomization.yaml").read_text())
    assert component["kind"] == "Component"
    for found in (base, more):
        (role,) = [each for each in found.values() if each["kind"] == "ClusterRole"]
        (binding,) = [each for each in found.values() if each["kind"] == "ClusterRoleBinding"]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        subjects = [(each["namespace"], each["name"]) for each in binding["subjects"]]
        assert subjects == [("topoproxy-system", "topoproxy-agent")]


def test_the_chart_renders_what_the_kustomization_has(helm: str, tmp_path: Path) -> None:
    base = {name: bare(each) for name, each in kustomized(AGENT).items() if name[0] != "Namespace"}
    more = {name: bare(each) for name, each in kustomized(AGENT / "rejected-pods").items()}
    found = {key(each): bare(each) for each in rendered(helm, CHART, tmp_path, **SAME)}
    assert found == base
    permitted = rendered(helm, CHART, tmp_path, **SAME, permissions={"rejectedPods": True})
    assert {key(each): bare(each) for each in permitted} == base | more
    for each in permitted:
        if each["kind"].startswith("ValidatingAdmissionPolicy"):
            assert faults(each) == []


def test_two_releases_have_names_of_their_own(helm: str, tmp_path: Path) -> None:
    found = rendered(helm, CHART, tmp_path, namespace="team", permissions={"deletePods": True})
    (daemon,) = [each for each in found if each["kind"] == "DaemonSet"]
    labels = daemon["spec"]["template"]["metadata"]["labels"]
    assert daemon["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert daemon["spec"]["template"]["spec"]["containers"][0]["image"] == f"topoproxy:{proxy.__version__}"
    (policy,) = [each for each in found if each["kind"] == "ValidatingAdmissionPolicy"]
    account = "system:serviceaccount:team:rel-agent"
    assert account in policy["spec"]["matchConditions"][0]["expression"]
    assert all(each["metadata"]["name"].startswith("rel-agent") for each in found)
    assert DELETION in rules(found)
    assert EVICTION not in rules(found)


def test_the_restriction_needs_a_kubernetes_that_names_the_node_of_a_token(helm: str, tmp_path: Path) -> None:
    old = render(helm, CHART, tmp_path, kubernetes="1.31.4")
    assert old.returncode != 0
    assert "nodeRestriction needs Kubernetes 1.32" in old.stderr
    found = rendered(helm, CHART, tmp_path, kubernetes="1.31.4", nodeRestriction=False)
    assert not [each for each in found if each["kind"].startswith("ValidatingAdmissionPolicy")]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_helm_refuses_wrong_values_of_the_agent(helm: str, tmp_path: Path, wrong: dict[str, Any]) -> None:
    done = render(helm, CHART, tmp_path, **wrong)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


def test_helm_lints_the_chart_of_the_agent_and_its_schema_describes_all_values(helm: str) -> None:
    done = subprocess.run([helm, "lint", "--strict", CHART], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.Draft7Validator(schema).validate(values)
    assert set(values) == set(schema["properties"]) - {"global"}
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == proxy.__version__


@pytest.mark.parametrize("release", ["topoproxy", "topoproxy-agent"])
def test_a_release_named_as_the_chart_has_the_same_objects(helm: str, tmp_path: Path, release: str) -> None:
    """The charts of agent and scheduler are installed in one namespace, where release names are unique."""
    found = rendered(helm, CHART, tmp_path, release=release)
    assert {each["metadata"]["name"] for each in found if each["kind"] == "DaemonSet"} == {"topoproxy-agent"}
