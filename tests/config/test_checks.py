"""Settings checked against each other and against a machine."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from proxy.config import Config, check_against, override, parse
from proxy.config.checks import check, check_start, memory_misfits, partly_reserved_cores, usable_memory
from proxy.model.errors import ConfigError, UsageError
from proxy.model.idset import CpuSet
from proxy.model.machine import Cpu, HugePages, Machine, NumaNode
from proxy.topology.regular_machine import regular_machine

MACHINE = Machine(
    cpus=tuple(Cpu(i, i, 0) for i in (0, 1, 3)),
    nodes=(NumaNode(0, CpuSet((0, 1, 3))),),
    present=CpuSet(range(4)),
    possible=CpuSet(range(8)),
)
GI = 1 << 30
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
                "and kubeReserved and systemReserved say 2Gi (evictionHard may add to it)"
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
                "and kubeReserved, systemReserved and evictionHard say 2Gi"
            ),
        ),
        (
            MEMORY + "[{numaNode: 0, limits: {memory: 1Gi}}]\nevictionHard: {memory.available: 512Mi}",
            (
                "reservedMemory: the nodes keep 1Gi of memory together, "
                "and kubeReserved, systemReserved and evictionHard say 512Mi"
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


@pytest.mark.parametrize("cpus", ["", "0", "0-1", "3"])
def test_reserved_cpus_that_fit_the_machine_are_accepted(cpus: str) -> None:
    check_against(parse(f"reservedSystemCPUs: '{cpus}'", "f.yaml"), MACHINE)


@pytest.mark.parametrize(
    ("cpus", "message"),
    [
        ("0-3", r"reservedSystemCPUs: CPU 2 is offline \(online: 0-1,3\)"),
        ("2,7-8", "there are no CPUs 7-8"),
        ("0-1,3", "all CPUs are reserved; none are left for containers"),
    ],
)
def test_reserved_cpus_that_do_not_fit_the_machine_are_refused(cpus: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)^cannot use the configuration f\.yaml: .*{message}"):
        check_against(parse(f"reservedSystemCPUs: '{cpus}'", "f.yaml"), MACHINE)


def unfit(text: str, machine: Machine) -> str:
    with pytest.raises(ConfigError) as caught:
        check_against(parse(text, "f.yaml"), machine)
    return str(caught.value).removeprefix("cannot use the configuration f.yaml: ")


def test_an_amount_of_cpus_leaves_one() -> None:
    check_against(parse("kubeReserved: {cpu: 1.5}\nsystemReserved: {cpu: 0.5}", "f"), MACHINE)
    assert unfit("kubeReserved: {cpu: 1.5}\nsystemReserved: {cpu: 0.6}", MACHINE) == (
        "kubeReserved and systemReserved: they reserve 3 of 3 CPUs; "
        "none are left for containers (online: 0-1,3)"
    )
    check_against(parse("kubeReserved: {cpu: 9}\nreservedSystemCPUs: 0", "f"), MACHINE)


def nodes(count: int, distance: bool = True) -> Machine:
    return replace(
        MACHINE,
        nodes=tuple(
            NumaNode(i, CpuSet(), 4 * GI, {2048: HugePages(512)}, (10,) * count if distance else ())
            for i in range(count)
        ),
    )


def test_options_against_the_machine() -> None:
    sockets = replace(nodes(1), cpus=(Cpu(0, 0, 0), Cpu(1, 1, 1)))
    text = STATIC + "{align-by-socket: true}"
    check_against(parse(text, "f"), nodes(1))
    assert unfit(text, sockets) == (
        "cpuManagerPolicyOptions: align-by-socket needs at least as many NUMA nodes as sockets, "
        "this machine has 2 sockets and 1 NUMA nodes"
    )
    near = "topologyManagerPolicyOptions: {prefer-closest-numa-nodes: true}\n"
    check_against(parse(near, "f"), nodes(2, distance=False))
    check_against(parse(near + "topologyManagerPolicy: best-effort", "f"), nodes(2))
    assert unfit(near + "topologyManagerPolicy: best-effort", nodes(2, distance=False)).startswith(
        "topologyManagerPolicyOptions: prefer-closest-numa-nodes needs the distances between all NUMA nodes"
    )
    limit = "topologyManagerPolicyOptions: {max-allowable-numa-nodes: 8}\ntopologyManagerPolicy: restricted"
    check_against(parse(limit, "f"), nodes(8))
    check_against(parse("topologyManagerPolicy: restricted", "f"), nodes(9))
    assert unfit(limit, nodes(9)) == (
        "topologyManagerPolicy restricted: this machine has 9 NUMA nodes, max-allowable-numa-nodes is 8"
    )


def test_reserved_memory_fits_the_nodes() -> None:
    fits = MEMORY + "[{numaNode: 0, limits: {memory: 3Gi, hugepages-2Mi: 1Gi}}]"
    check_against(parse(fits, "f"), nodes(1))
    check_against(parse(MEMORY + "[{numaNode: 0, limits: {memory: 9Gi}}]", "f"), MACHINE)  # size not reported
    check_against(parse("reservedMemory: [{numaNode: 5, limits: {memory: 1}}]", "f"), nodes(1))  # not used
    assert unfit(MEMORY + "[{numaNode: 0, limits: {memory: 3073Mi}}]", nodes(1)) == (
        "reservedMemory: NUMA node 0 cannot keep 3073Mi of memory, it has 3Gi besides its huge pages"
    )
    assert unfit(MEMORY + "[{numaNode: 0, limits: {memory: 1, hugepages-1Gi: 1Gi}}]", nodes(1)) == (
        "reservedMemory: NUMA node 0 cannot keep 1Gi of hugepages-1Gi, it has 0"
    )
    assert unfit(MEMORY + "[{numaNode: 2, limits: {memory: 1}}]", nodes(2)) == (
        "reservedMemory: there is no NUMA node 2 (there are: 0, 1)"
    )


def test_all_errors_are_reported_together() -> None:
    text = MEMORY + "[{numaNode: 1, limits: {memory: 1}}]\nreservedSystemCPUs: 9"
    assert unfit(text, nodes(1)).splitlines() == [
        "2 problems:",
        "  reservedSystemCPUs: there is no CPU 9 (online: 0-1,3)",
        "  reservedMemory: there is no NUMA node 1 (there are: 0)",
    ]


def test_usable_memory_excludes_huge_pages() -> None:
    node = NumaNode(0, CpuSet(), 4 * GI, {2048: HugePages(512), 1048576: HugePages(1), 64: HugePages(0)})
    assert usable_memory(node) == {
        "memory": 2 * GI,
        "hugepages-2Mi": GI,
        "hugepages-1Gi": GI,
        "hugepages-64Ki": 0,
    }
    assert usable_memory(NumaNode(0, CpuSet())) == {}
    assert usable_memory(NumaNode(0, CpuSet(), 0)) == {"memory": 0}
    assert memory_misfits({0: {"memory": -5}}, {0: {"memory": 1}})[0].endswith(
        "it has 0 besides its huge pages"
    )
    assert memory_misfits({}, Config().reserved_memory) == []


def test_reserved_cpus_exist_and_leave_some_cpus() -> None:
    check_against(parse("koordinator: {reservedCPUs: 0, systemCPUs: 1}", "f"), MACHINE)
    everything = "koordinator: {reservedCPUs: 0-1, systemCPUs: 3, systemCPUsExclusive: %s}"
    check_against(parse(everything % "false", "f"), MACHINE)
    assert unfit(everything % "true", MACHINE) == (
        "koordinator: all CPUs are reserved; none are left for containers (online: 0-1,3)"
    )
    assert unfit("koordinator: {reservedCPUs: 2, systemCPUs: '7'}", MACHINE).splitlines() == [
        "2 problems:",
        "  koordinator.systemCPUs: CPU 7 is not online here (online: 0-1,3)",
        "  koordinator.reservedCPUs: CPU 2 is not online here (online: 0-1,3)",
    ]
    strict = (
        STATIC + "{strict-cpu-reservation: true}\nreservedSystemCPUs: 0-1\nkoordinator: {reservedCPUs: '3'}"
    )
    assert "all CPUs are reserved" in unfit(strict, MACHINE)


NODES = replace(
    nodes(2),
    nodes=(
        NumaNode(0, CpuSet([0, 1, 2, 3]), 8 << 30, None, (10, 20)),
        NumaNode(1, CpuSet(), 0, None, (20, 10)),
    ),
    extra={"numa": {"possible": "0-2"}},
)


@pytest.mark.parametrize(
    ("text", "machine", "reported"),
    [
        ("reservedSystemCPUs: 0,2", MACHINE, "reservedSystemCPUs: CPU 2 is offline (online: 0-1,3)"),
        ("koordinator: {systemCPUs: 2}", MACHINE, "koordinator.systemCPUs: CPU 2 is not online here"),
        (
            "reservedSystemCPUs: 0-1,3",
            MACHINE,
            "reservedSystemCPUs: all CPUs are reserved; none are left for containers while CPU 2 is offline",
        ),
        (
            "koordinator: {systemCPUs: '2,4'}",
            replace(MACHINE, present=CpuSet([0, 1, 2, 3, 4])),
            "koordinator.systemCPUs: CPUs 2,4 are not online here",
        ),
        (MEMORY + "[{numaNode: 1, limits: {memory: 1Gi}}]", NODES, "NUMA node 1 cannot keep 1Gi of memory"),
        (MEMORY + "[{numaNode: 2, limits: {memory: 1Gi}}]", NODES, "there is no NUMA node 2"),
    ],
)
def test_a_daemon_starts_while_parts_of_the_machine_are_offline(
    text: str, machine: Machine, reported: str
) -> None:
    config = parse(text, "f.yaml")
    (away,) = check_start(config, machine)
    assert reported in away
    assert away.endswith(": this takes effect when it is back online")
    with pytest.raises(ConfigError, match=re.escape(reported)):
        check_against(config, machine)


@pytest.mark.parametrize(
    ("text", "machine"),
    [
        ("reservedSystemCPUs: 0,9", MACHINE),
        ("reservedSystemCPUs: 0-3", MACHINE),
        ("koordinator: {systemCPUs: 9}", MACHINE),
        (MEMORY + "[{numaNode: 0, limits: {memory: 99Gi}}]", NODES),
        (MEMORY + "[{numaNode: 7, limits: {memory: 1Gi}}]", NODES),
    ],
)
def test_a_daemon_does_not_start_with_parts_that_never_existed(text: str, machine: Machine) -> None:
    with pytest.raises(ConfigError):
        check_start(parse(text, "f.yaml"), machine)


def test_possible_nodes_that_cannot_be_read_are_ignored() -> None:
    machine = replace(NODES, extra={"numa": {"possible": "0-x"}})
    check_start(parse(MEMORY + "[{numaNode: 0, limits: {memory: 1Gi}}]", "f"), machine)
    with pytest.raises(ConfigError, match="there is no NUMA node 2"):
        check_start(parse(MEMORY + "[{numaNode: 2, limits: {memory: 1Gi}}]", "f"), machine)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (
            "reservedSystemCPUs: 0",
            "reservedSystemCPUs: it reserves a part of some cores, and their other threads (CPU 4)",
        ),
        ("reservedSystemCPUs: '0,5'", "their other threads (CPUs 1,4) do not count as free"),
        ("reservedSystemCPUs: '0,4'", ""),
        (
            "kubeReserved: {cpu: 500m}",
            "systemReserved: they reserve 1 CPU, and a core has 2: the rest of a core",
        ),
        ("kubeReserved: {cpu: 2}\nsystemReserved: {cpu: 1}", "they reserve 3 CPUs"),
        ("kubeReserved: {cpu: 2}", ""),
        ("", ""),
    ],
)
def test_a_core_that_is_reserved_in_part_is_named(text: str, lost: str) -> None:
    machine = regular_machine(1, 1, 4, 2)
    with_option = parse(f"{STATIC}{{full-pcpus-only: true}}\n{text}\n", "f.yaml")
    found = partly_reserved_cores(with_option, machine)
    assert lost in found
    assert bool(found) is bool(lost)
    assert partly_reserved_cores(with_option, regular_machine(1, 1, 8, 1)) == ""
    assert partly_reserved_cores(parse(f"cpuManagerPolicy: static\n{text}\n", "f.yaml"), machine) == ""


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


def test_device_plugins_without_a_source_of_pods_are_named() -> None:
    machine = NODES
    text = "devicePlugins: {enabled: true}\n"
    (message,) = check_start(parse(text, "f.yaml"), machine)
    assert message.startswith("devicePlugins.enabled: no container gets devices")
    for source in (
        "kubelet: {podsApi: /p}",
        "kubelet: {pods: 'https://127.0.0.1:10250'}",
        "clusterFacts: {directory: /d}",
    ):
        assert check_start(parse(f"{text}{source}\n", "f.yaml"), machine) == []
    assert check_start(parse("devicePlugins: {enabled: false}\n", "f.yaml"), machine) == []
