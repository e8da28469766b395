"""The chart, linted and rendered by helm itself, and its schema."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import proxy
from proxy.config import load
from tests.deploy.charts import render, rendered

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/topoproxy"
WRONG = [
    {"state": "here"},
    {"stat": "attached"},
    {"image": {"repository": ""}},
    {"image": {"repository": "x", "digest": "sha256:12"}},
    {"attachTimeout": "2m"},
    {"config": {"apiVersion": "topoproxy/v1"}},
    {"nodeSelector": {"a": 1}},
]


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def objects(helm: str, tmp_path: Path, **changed: object) -> dict[str, Any]:
    return {each["kind"]: each for each in rendered(helm, CHART, tmp_path, **changed)}


pytestmark = pytest.mark.timeout(1100)


def test_the_chart_has_the_version_of_the_program() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == proxy.__version__


def test_the_schema_is_valid_and_accepts_and_describes_all_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)
    validator.validate(values())
    assert set(values()) == set(schema["properties"]) - {"global"}
    for wrong in WRONG:
        assert list(validator.iter_errors({**values(), **wrong})), wrong


def test_helm_lints_the_chart(helm: str) -> None:
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 chart(s) failed" in done.stdout


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_helm_refuses_wrong_values(helm: str, tmp_path: Path, wrong: dict[str, object]) -> None:
    done = render(helm, CHART, tmp_path, **wrong)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


def test_the_chart_renders_an_installer_that_changes_one_node_at_a_time(helm: str, tmp_path: Path) -> None:
    found = objects(helm, tmp_path)
    assert set(found) == {"ServiceAccount", "ConfigMap", "Role", "RoleBinding", "DaemonSet"}
    spec = found["DaemonSet"]["spec"]
    assert spec["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == f"topoproxy:{proxy.__version__}"
    assert container["command"] == ["/bin/sh", "/scripts/node.sh", "attached"]
    assert container["securityContext"] == {"privileged": True}
    assert pod["hostPID"] is True
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    turn = {each["name"]: each.get("value") for each in container["env"]}["TURN"]
    assert turn == "kube-system/" + found["Role"]["rules"][0]["resourceNames"][0]
    data = found["ConfigMap"]["data"]
    assert data["node.sh"].rstrip() == (CHART / "files/node.sh").read_text().rstrip()
    assert data["turn.py"].rstrip() == (CHART / "files/turn.py").read_text().rstrip()
    for each in found.values():
        assert each["metadata"]["namespace"] == "kube-system"


def test_topoproxy_accepts_the_configuration_of_the_chart(helm: str, tmp_path: Path) -> None:
    config = {
        "mode": "enforce",
        "cpuManagerPolicy": "static",
        "reservedSystemCPUs": "0",
        "log": {"level": "debug"},
    }
    data = objects(helm, tmp_path, config=config)["ConfigMap"]["data"]
    (tmp_path / "c.yaml").write_text(data["config.yaml"])
    assert load(tmp_path / "c.yaml").mode.value == "enforce"
    none = objects(helm, tmp_path, config={"mode": None})["ConfigMap"]["data"]["config.yaml"]
    assert not (none or "").strip()


def test_a_digest_wins_and_a_change_of_the_configuration_rolls_out(helm: str, tmp_path: Path) -> None:
    digest = f"sha256:{'0' * 64}"
    one = objects(helm, tmp_path, image={"repository": "r/t", "tag": "x", "digest": digest})["DaemonSet"]
    two = objects(helm, tmp_path, config={"mode": "enforce"})["DaemonSet"]
    parts = [each["spec"]["template"] for each in (one, two)]
    assert parts[0]["spec"]["containers"][0]["image"] == f"r/t@{digest}"
    assert len({each["metadata"]["annotations"]["checksum/config"] for each in parts}) == 2
