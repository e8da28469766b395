"""Settings from the cluster: only permitted keys, the same validation, and precedence of the operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.config.cluster_config import FILE_NAME
from proxy.config.files import exposed_files
from proxy.config.load import load, override
from proxy.config.machine_checks import start_config
from proxy.config.schema import Config
from proxy.model.errors import ConfigError
from proxy.topology.regular_machine import regular_machine

MACHINE = regular_machine(1, 1, 2, 2)
"""Four CPUs."""


class NodeFiles:
    """A node's configuration, and the file that the agent has written."""

    def __init__(self, directory: Path) -> None:
        directory.chmod(0o700)
        self.file = directory / "config.yaml"
        self.cluster = directory / "cluster"
        self.cluster.mkdir(mode=0o700)

    def own(self, text: str) -> None:
        self.file.write_text(f"{text}\nclusterFacts: {{directory: {self.cluster}}}\n")
        self.file.chmod(0o600)

    def wanted(self, text: str) -> None:
        path = self.cluster / FILE_NAME
        path.write_text(text)
        path.chmod(0o600)

    def load(self, cluster: str | None = None) -> Config:
        return load(self.file, trusted=True, cluster=cluster)


@pytest.fixture
def node(tmp_path: Path) -> NodeFiles:
    return NodeFiles(tmp_path)


def test_permitted_settings_of_the_cluster_override_the_file_and_its_drop_ins(node: NodeFiles) -> None:
    node.own(
        "clusterConfig: {allowed: [admission, log.level]}\n"
        "admission: {maxCPUsPerPod: 2, maxCPUsPerNode: 4}\nlog: {format: json}"
    )
    drop_ins = node.file.parent / "config.d"
    drop_ins.mkdir(mode=0o700)
    (drop_ins / "a.yaml").write_text("admission: {maxCPUsPerNode: 5}")
    (drop_ins / "a.yaml").chmod(0o600)
    assert node.load().without_cluster is None
    node.wanted('{"admission": {"maxCPUsPerPod": 1}, "log": {"level": "debug"}}')
    config = node.load()
    assert (config.admission.pod_limit, config.admission.node_limit) == (1, 5)
    assert (config.log.level, config.log.format) == ("debug", "json")
    assert config.source.endswith("config.yaml with config.d/a.yaml with the settings from the cluster")
    assert config.without_cluster is not None
    assert (config.without_cluster.admission.pod_limit, config.without_cluster.log.level) == (2, "info")
    assert config.cluster_fault == ""
    changed = override(config, {"log.level": ("--log-level", "error")})
    assert changed.without_cluster is not None
    assert (changed.log.level, changed.without_cluster.log.level) == ("error", "error"), (
        "the command line wins"
    )


@pytest.mark.parametrize(
    ("allowed", "wanted", "why"),
    [
        (
            "[log.level]",
            "admission: {maxCPUsPerPod: 1}",
            "cluster, line 1: admission.maxCPUsPerPod: ",
        ),
        ("[log.level]", "log: {format: json}", "log.format: this node does not permit it"),
        ("[log.level]", "log: {level: loud}", "log.level: 'loud' is not"),
        ("[log]", "log: {level: debug, levels: x}", "log.levels: this node does not permit it"),
        ("[log]", "listen: unix:///x", "listen: this node does not permit it"),
        ("[koordinator]", "koordinator: {nodeObject: /etc/x}", "koordinator.nodeObject: this node does not"),
        (
            "[log]",
            "clusterConfig: {allowed: [admission]}",
            "clusterConfig.allowed: this node does",
        ),
        ("[log]", "hooks: {enabled: false}", "hooks.enabled: this node does not permit it"),
        ("[log]", "log: [", "not YAML"),
        ("[log]", "- log", "must be keys with values"),
        ("[log]", "log: debug", "log: this node does not permit it"),
        ("[enforce]", "enforce: {percent: 5, percent: 6}", "enforce.percent: given twice"),
        (
            "[cpuManagerPolicyOptions]",
            "cpuManagerPolicyOptions: {full-pcpus-only: 'true'}",
            "cannot be used with cpuManagerPolicy none",
        ),
    ],
)
def test_what_is_refused_is_ignored_as_a_whole_and_reported(
    node: NodeFiles, allowed: str, wanted: str, why: str
) -> None:
    node.own(f"clusterConfig: {{allowed: {allowed}}}\nadmission: {{maxCPUsPerNode: 3}}")
    before = node.load()
    node.wanted(wanted)
    config = node.load()
    assert config == before
    assert config.without_cluster is None
    assert config.cluster_fault.startswith("the settings from the cluster are ignored: ")
    assert why in config.cluster_fault
    assert exposed_files(config)[0] == config.cluster_fault
    with pytest.raises(ConfigError, match="with the settings from the cluster"):
        node.load(cluster=wanted)


def test_each_fault_in_the_settings_of_the_cluster_is_listed_once(node: NodeFiles) -> None:
    node.own("clusterConfig: {allowed: [log.level, explainHistory]}")
    node.wanted("log: {level: loud}\nexplainHistory: few")
    fault = node.load().cluster_fault
    assert "2 problems" in fault
    assert fault.count("log.level:") == fault.count("explainHistory:") == 1


def test_nothing_is_permitted_by_default(node: NodeFiles) -> None:
    node.own("")
    node.wanted("log: {level: debug}")
    config = node.load()
    assert (config.log.level, config.without_cluster, config.cluster_fault) == ("info", None, "")


def test_a_revoked_permission_takes_effect_at_once(node: NodeFiles) -> None:
    node.own("clusterConfig: {allowed: [log.level]}")
    node.wanted("log: {level: debug}")
    assert node.load().log.level == "debug"
    node.own("clusterConfig: {allowed: [admission]}")
    config = node.load()
    assert config.log.level == "info"
    assert "does not permit it" in config.cluster_fault


def test_a_file_that_others_may_write_is_ignored(node: NodeFiles) -> None:
    node.own("clusterConfig: {allowed: [log.level]}")
    node.wanted("log: {level: debug}")
    (node.cluster / FILE_NAME).chmod(0o666)
    config = node.load()
    assert config.log.level == "info"
    assert "cannot trust the configuration" in config.cluster_fault


def test_an_error_in_the_nodes_own_file_remains_an_error(node: NodeFiles) -> None:
    node.own("log: {level: loud}\nclusterConfig: {allowed: [log]}")
    node.wanted("log: {level: debug}")
    with pytest.raises(ConfigError, match="'loud'"):
        node.load()


@pytest.mark.parametrize(
    ("allowed", "why"),
    [
        ("[listen]", "listen needs a restart, so the cluster cannot set it"),
        ("[koordinator.nodeObject]", "needs a restart"),
        ("[hooks]", "hooks is never set by the cluster"),
        ("[hooks.settings]", "hooks.settings is never set by the cluster"),
        ("[clusterConfig]", "never set by the cluster"),
        ("[admisson]", "admisson is not a key; did you mean admission"),
        ("admission", "must be a list of keys"),
        ("['']", "'' is not a key"),
    ],
)
def test_some_keys_cannot_be_permitted(node: NodeFiles, allowed: str, why: str) -> None:
    node.own(f"clusterConfig: {{allowed: {allowed}}}")
    with pytest.raises(ConfigError) as caught:
        node.load()
    assert why in str(caught.value)


def test_permitting_needs_a_directory(node: NodeFiles) -> None:
    node.file.write_text("clusterConfig: {allowed: [log]}")
    with pytest.raises(ConfigError, match="has no effect without clusterFacts"):
        load(node.file)


def test_a_machine_that_cannot_meet_the_clusters_settings_starts_without_them(node: NodeFiles) -> None:
    node.own("clusterConfig: {allowed: [reservedSystemCPUs]}\nreservedSystemCPUs: '0'")
    node.wanted("reservedSystemCPUs: 0-9")
    config = node.load()
    assert config.without_cluster is not None
    found, notices = start_config(config, MACHINE)
    assert (str(found.reserved_system_cpus), notices) == ("0", [])
    assert "there are no CPUs 4-9" in found.cluster_fault
    node.wanted("reservedSystemCPUs: 0-1")
    found, _ = start_config(node.load(), MACHINE)
    assert (str(found.reserved_system_cpus), found.cluster_fault) == ("0-1", "")
    own: Any = node.load().without_cluster
    with pytest.raises(ConfigError, match="there are no CPUs"):
        start_config(override(own, {"reservedSystemCPUs": ("--x", "0-9")}), MACHINE)
