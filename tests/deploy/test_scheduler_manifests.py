"""The manifests of the second kube-scheduler: a chart and a kustomization that agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.charts import render, rendered

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/topoproxy-scheduler"
SCHEDULER = ROOT / "deploy/scheduler"
SAME: dict[str, Any] = {"release": "topoproxy", "namespace": "topoproxy-system", "kubernetes": "1.36.2"}
WRONG: list[dict[str, Any]] = [
    {"strategy": "random"},
    {"replicas": 0},
    {"schedulerName": "No Name"},
    {"kubeScheduler": {}},
]

pytestmark = pytest.mark.timeout(1100)


def key(value: dict[str, Any]) -> tuple[str, str]:
    return value["kind"], value["metadata"]["name"]


def objects(*names: str) -> dict[tuple[str, str], Any]:
    values = [each for name in names for each in yaml.safe_load_all((SCHEDULER / name).read_text())]
    return {key(each): bare(each) for each in values if each["kind"] != "Namespace"}


def bare(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object without the names of images, and with the configuration in a map as an object."""
    found: dict[str, Any] = json.loads(json.dumps(value))
    if found["kind"] == "Deployment":
        for container in found["spec"]["template"]["spec"]["containers"]:
            container.pop("image")
            container.pop("imagePullPolicy", None)
        found["spec"]["template"]["metadata"].pop("annotations", None)
    if found["kind"] == "ConfigMap":
        found["data"] = {name: yaml.safe_load(text) for name, text in found["data"].items()}
    return found


def test_the_chart_renders_what_the_kustomization_has(helm: str, tmp_path: Path) -> None:
    listed = yaml.safe_load((SCHEDULER / "kustomization.yaml").read_text())["resources"]
    found = {key(each): bare(each) for each in rendered(helm, CHART, tmp_path, **SAME)}
    assert found == objects(*listed)
    policed = {key(each): bare(each) for each in rendered(helm, CHART, tmp_path, **SAME, namePolicy=True)}
    assert policed == objects(*listed, "scheduler-name-policy.yaml")


def test_two_releases_have_names_of_their_own(helm: str, tmp_path: Path) -> None:
    found = rendered(helm, CHART, tmp_path, namespace="team", kubernetes="1.36.2", schedulerName="aligned")
    assert all(each["metadata"]["name"].startswith("rel-scheduler") for each in found)
    (config,) = [bare(each)["data"]["config.yaml"] for each in found if each["kind"] == "ConfigMap"]
    assert config["profiles"] == [{"schedulerName": "aligned"}]
    assert config["extenders"][0]["urlPrefix"] == "https://rel-scheduler-extender.team.svc"
    assert config["leaderElection"]["resourceName"] == "rel-scheduler"


def test_a_change_of_the_configuration_restarts_kube_scheduler(helm: str, tmp_path: Path) -> None:
    """kube-scheduler reads its configuration only when it starts."""

    def template(**values: Any) -> Any:
        found = rendered(helm, CHART, tmp_path, **SAME, **values)
        (deployment,) = [each for each in found if key(each) == ("Deployment", "topoproxy-scheduler")]
        return deployment["spec"]["template"]["metadata"]

    assert template() == template(strategy="most-allocated")
    assert template() != template(schedulerName="aligned")


def test_an_update_ends_the_replica_that_holds_the_lease() -> None:
    """No other replica is ready before it has ended.

    Kubernetes v1.36 pkg/controller/deployment/rolling.go, reconcileOldReplicaSets: old pods that are ready
    are removed only while more than ``replicas - maxUnavailable`` pods are available.
    """
    deployment = objects("extender.yaml")["Deployment", "topoproxy-scheduler-extender"]
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": "100%", "maxSurge": 0}


def test_the_deployment_selects_its_own_pods() -> None:
    for name in ("extender.yaml", "scheduler.yaml"):
        for each in yaml.safe_load_all((SCHEDULER / name).read_text()):
            if each["kind"] == "Deployment":
                labels = each["spec"]["template"]["metadata"]["labels"]
                assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_helm_refuses_wrong_values_of_the_scheduler(helm: str, tmp_path: Path, wrong: dict[str, Any]) -> None:
    assert render(helm, CHART, tmp_path, **wrong).returncode != 0


@pytest.mark.parametrize("release", ["topoproxy", "topoproxy-scheduler"])
def test_a_release_named_as_the_chart_has_the_same_objects(helm: str, tmp_path: Path, release: str) -> None:
    """The charts of agent and scheduler are installed in one namespace, where release names are unique."""
    found = rendered(helm, CHART, tmp_path, release=release, kubernetes="1.36.2")
    names = {each["metadata"]["name"] for each in found if each["kind"] == "Service"}
    assert names == {"topoproxy-scheduler-extender"}
