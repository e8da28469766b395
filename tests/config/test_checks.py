"""Settings checked against each other."""

from __future__ import annotations

import pytest

from proxy.config import override, parse
from proxy.config.checks import check
from proxy.model.errors import ConfigError, UsageError

STATIC = "cpuManagerPolicy: static\ncpuManagerPolicyOptions: "
MEMORY = "memoryManagerPolicy: Static\nreservedMemory: "


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml")
    assert str(caught.value).startswith("cannot use the configuration f.yaml: ")
    return str(caught.value).removeprefix("cannot use the configuration f.yaml: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "cpuManagerPolicyOptions: {full-pcpus-only: true}",
            "cpuManagerPolicyOptions: full-pcpus-only cannot be used with cpuManagerPolicy none",
        ),
        (
            STATIC + "{align-by-socket: true}\ntopologyManagerPolicy: single-numa-node",
            "cpuManagerPolicyOptions: align-by-socket and topologyManagerPolicy single-numa-node exclude",
        ),
        (
            STATIC + "{strict-cpu-reservation: true}",
            (
                "cpuManagerPolicyOptions: strict-cpu-reservation needs CPUs that are reserved, and neither "
                "reservedSystemCPUs nor the cpu of kubeReserved and systemReserved reserves any"
            ),
        ),
        (
            STATIC + "{strict-cpu-reservation: true}\nkubeReserved: {cpu: 0}",
            "cpuManagerPolicyOptions: strict-cpu-reservation needs CPUs that are reserved",
        ),
        (
            "memoryManagerPolicy: Static",
            "memoryManagerPolicy: Static needs memory in reservedMemory on at least one NUMA node",
        ),
        (
            MEMORY + "[{numaNode: 0, limits: {hugepages-1Gi: 1Gi}}]",
            "memoryManagerPolicy: Static needs memory in reservedMemory",
        ),
        (
            MEMORY + "[{numaNode: 0, limits: {memory: 3Gi}}]\nkubeReserved: {memory: 2Gi}",
            (
                "reservedMemory: the nodes keep 3Gi of memory together, "
                "and kubeReserved and systemReserved amount to 2Gi (evictionHard may add to it)"
            ),
        ),
        (
            MEMORY + "[{numaNode: 0, limits: {memory: 1Gi}}]\nsystemReserved: {memory: 2Gi}",
            "reservedMemory: the nodes keep 1Gi of memory together, and kubeReserved and systemReserved",
        ),
        (
            MEMORY + "[{numaNode: 0, limits: {memory: 1Gi}}]\nsystemReserved: {memory: 1Gi}\n"
            "evictionHard: {memory.available: 1Gi}",
            (
                "reservedMemory: the nodes keep 1Gi of memory together, "
                "and kubeReserved, systemReserved and evictionHard amount to 2Gi"
            ),
        ),
        (
            MEMORY + "[{numaNode: 0, limits: {memory: 1Gi}}]\nevictionHard: {memory.available: 512Mi}",
            (
                "reservedMemory: the nodes keep 1Gi of memory together, "
                "and kubeReserved, systemReserved and evictionHard amount to 512Mi"
            ),
        ),
        (
            "kubelet: {tokenFile: /t}",
            "kubelet.tokenFile: has no effect without kubelet.pods or kubelet.configz",
        ),
        (
            "kubelet: {insecureSkipVerify: true}",
            "kubelet.insecureSkipVerify: has no effect without kubelet.pods or kubelet.configz",
        ),
        (
            "kubelet: {pods: 'http://localhost:10255', caFile: /c}",
            "kubelet.caFile: has no effect with kubelet.pods http://localhost:10255, only with https://",
        ),
        (
            "kubelet: {pods: 'http://a:1', configz: 'http://a:2', caFile: /c}",
            "kubelet.caFile: has no effect with kubelet.pods http://a:1 and kubelet.configz http://a:2, only",
        ),
        ("kubelet: {pods: 'https://a:1', certFile: /c}", "kubelet.certFile: needs kubelet.keyFile too"),
        ("kubelet: {pods: 'https://a:1', keyFile: /c}", "kubelet.keyFile: needs kubelet.certFile too"),
        (
            "kubelet: {pods: 'https://a:1', caFile: /c, insecureSkipVerify: true}",
            "kubelet.caFile: has no effect with kubelet.insecureSkipVerify",
        ),
        ("listen: /l\nkubelet: {podsApi: /l}", "kubelet.podsApi: /l is listen, not a socket of kubelet's"),
        (
            "runtime: /l\nkubelet: {podResources: /l}",
            "kubelet.podResources: /l is runtime, not a socket of kub",
        ),
    ],
)
def test_contradictory_settings_are_refused(text: str, message: str) -> None:
    assert refused(text).startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        "cpuManagerPolicyOptions: {full-pcpus-only: false}",
        STATIC + "{align-by-socket: true}\ntopologyManagerPolicy: restricted",
        STATIC + "{strict-cpu-reservation: true}\nreservedSystemCPUs: 0",
        STATIC + "{strict-cpu-reservation: true}\nsystemReserved: {cpu: 100m}",
        "topologyManagerPolicyOptions: {prefer-closest-numa-nodes: true}",
        "reservedSystemCPUs: 0-3\nkubeReserved: {cpu: 1}",
        "reservedMemory: [{numaNode: 0, limits: {memory: 3Gi}}]\nkubeReserved: {memory: 2Gi}",
        MEMORY + "[{numaNode: 0, limits: {memory: 3Gi}}]",
        MEMORY + "[{numaNode: 0, limits: {memory: 3Gi}}]\nkubeReserved: {cpu: 1}",
        MEMORY + "[{numaNode: 0, limits: {memory: 3Gi}}]\nevictionHard: {nodefs.available: 10%}",
        MEMORY + "[{numaNode: 0, limits: {memory: 100Mi}}]\nevictionHard: {memory.available: 100Mi}",
        MEMORY + "[{numaNode: 0, limits: {memory: 1Gi}}, {numaNode: 1, limits: {memory: 1Gi}}]\n"
        "kubeReserved: {memory: 1.5Gi}\nsystemReserved: {memory: 512Mi}",
        MEMORY + "[{numaNode: 0, limits: {memory: 1124Mi}}]\nsystemReserved: {memory: 1Gi}",
        MEMORY + "[{numaNode: 0, limits: {memory: 2Gi}}]\nsystemReserved: {memory: 1Gi}\n"
        "evictionHard: {memory.available: 1Gi}",
        "kubelet: {pods: 'http://localhost:10255', podsApi: /p, podResources: /r}",
        "kubelet: {pods: 'https://a:1', tokenFile: /t, caFile: /c, certFile: /d, keyFile: /e}",
        "kubelet: {configz: 'https://a:1', tokenFile: /t, caFile: /c}",
        "kubelet: {pods: 'http://a:1', configz: 'https://a:1', insecureSkipVerify: true}",
    ],
)
def test_compatible_settings_are_accepted(text: str) -> None:
    parse(text, "f")


def test_the_command_line_is_checked_against_the_file() -> None:
    config = parse(STATIC + "{align-by-socket: true}", "f")
    with pytest.raises(
        UsageError, match="cannot use the settings together: cpuManagerPolicyOptions: align-by-soc"
    ):
        override(config, {"topologyManagerPolicy": ("--topology-manager-policy", "single-numa-node")})
    changed = override(
        config, {"kubelet.pods": ("--kubelet-pods", "https://A:1"), "kubeReserved.cpu": ("-x", "2")}
    )
    assert (changed.kubelet.pods, changed.kube_reserved.cpu) == ("https://a:1", 2000)


def test_the_directories_of_device_plugins_are_not_kubelets() -> None:
    def section(text: str) -> str:
        return f"devicePlugins: {{enabled: true, {text}}}\n"

    kubelets = "/var/lib/kubelet/device-plugins"
    assert check(parse(section("shim: []"), "test")) == []
    assert check(parse(section(f"shimDirectory: {kubelets}"), "test")) == []
    assert "is kubelet's own" in refused(section(f"socketDirectory: {kubelets}"))
    assert "is kubelet's own" in refused(section(f"shim: [a.b/c], shimDirectory: {kubelets}/x"))
    same = section("shim: [a.b/c], shimDirectory: /a, socketDirectory: /a")
    assert "must differ from socketDirectory" in refused(same)


@pytest.mark.parametrize(
    ("text", "key", "name"),
    [
        ("listen: %s/l", "adminSocket", "admin.sock"),
        (
            "devicePlugins: {enabled: true, socketDirectory: %s}",
            "devicePlugins.socketDirectory",
            "kubelet.sock",
        ),
        (
            "devicePlugins: {enabled: true, shim: [a.b/c], shimDirectory: %s}",
            "devicePlugins.shimDirectory",
            "kubelet.sock",
        ),
    ],
)
def test_a_derived_path_fits_a_unix_socket(text: str, key: str, name: str) -> None:
    directory = "/" + "ä" + "a" * (107 - 4 - len(name))
    parse(text % directory, "f")
    path = f"{directory}a/{name}"
    assert refused(text % f"{directory}a") == (
        f"{key}: the path {path} is 108 bytes long, a unix socket's at most 107"
    )


def test_a_path_that_is_not_used_may_be_long() -> None:
    directory = "/" + "a" * 104
    parse(f"listen: {directory}/l\nadminSocket: /a", "f")
    parse(f"devicePlugins: {{socketDirectory: {directory}}}", "f")
    parse(f"devicePlugins: {{enabled: true, shimDirectory: {directory}}}", "f")


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("listen: /a/l\nadminSocket: /b/s", "listen"),
        ("listen: /a/l", "listen and adminSocket"),
        ("runtime: /a/r", "runtime"),
        ("adminSocket: /a/s", "adminSocket"),
        ("hooks: {serve: /a/h}", "hooks.serve"),
        ("podResources: {serve: /a/p}", "podResources.serve"),
        ("kubelet: {podsApi: /a/p}", "kubelet.podsApi"),
        ("kubelet: {podResources: /a/p}", "kubelet.podResources"),
    ],
)
@pytest.mark.parametrize("directory", ["socketDirectory", "shimDirectory"])
def test_the_directories_of_device_plugins_have_no_other_sockets(
    text: str, keys: str, directory: str
) -> None:
    section = f"devicePlugins: {{enabled: %s, shim: [a.b/c], {directory}: %s}}\n{text}\n"
    assert refused(section % ("true", "/a")) == (
        f"devicePlugins.{directory}: /a is the directory of {keys}, and the sockets in it would be removed"
    )
    parse(section % ("true", "/"), "f")
    parse(section % ("true", "/a/b"), "f")
    parse(section % ("false", "/a"), "f")
