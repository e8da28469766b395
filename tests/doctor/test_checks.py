"""Each check separately: the state of a node, and the finding."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from proxy.doctor.checks import (
    CHECKS,
    EARLIEST_CLOCK_S,
    EXPIRES_S,
    FAIL_BELOW_BYTES,
    WARN_BELOW_BYTES,
    WITHOUT_CALLS_S,
    CheckResult,
    examine,
)
from proxy.doctor.facts import (
    AttachFacts,
    CertificateFacts,
    CgroupFacts,
    ConfigurationFacts,
    DaemonFacts,
    DoctorFacts,
    EndpointSetting,
    KubeletSetup,
    RuntimeFacts,
    SocketFacts,
    StateFacts,
)

OURS, THEIRS = "unix:///run/topoproxy/cri.sock", "unix:///run/containerd/containerd.sock"
NO_ENDPOINT = {"kubelet-endpoint": "fail"}
NOW = EARLIEST_CLOCK_S + 1e6
CONFIG, FLAGS, INSTANCE = (
    EndpointSetting(f"/var/lib/kubelet/{name}", THEIRS)
    for name in ("config.yaml", "kubeadm-flags.env", "instance-config.yaml")
)
KUBELET = KubeletSetup(
    "/var/lib/kubelet", None, structs.replace(CONFIG, endpoint=OURS), "systemd", "none", "None"
)
HEALTHY = DoctorFacts(
    NOW,
    runtime=RuntimeFacts("", "containerd 2.1.0", "systemd"),
    kubelet=KUBELET,
    daemon=DaemonFacts(clients=2, pods=3, last_call_s=1.0, open_files=4096),
    state=StateFacts(free_bytes=1 << 30),
    sockets=(SocketFacts("/run/topoproxy/cri.sock"),),
    certificates=(CertificateFacts("/etc/c.pem", ends=NOW + 2 * EXPIRES_S),),
    denials=0,
)


def node_with(**changes: Any) -> DoctorFacts:
    return structs.replace(HEALTHY, **changes)


def kubelet(**changes: Any) -> DoctorFacts:
    return node_with(kubelet=structs.replace(KUBELET, **changes))


def runtime(**changes: Any) -> DoctorFacts:
    return node_with(runtime=structs.replace(HEALTHY.runtime, **changes))


def daemon(**changes: Any) -> DoctorFacts:
    return node_with(daemon=structs.replace(HEALTHY.daemon, **changes))


def unusual(facts: DoctorFacts) -> dict[str, str]:
    """Return the checks that are not ok, with their results."""
    return {each.id: each.result.value for each in examine(facts) if each.result is not CheckResult.OK}


def test_the_cgroup_driver_of_the_runtime_counts() -> None:
    facts = structs.replace(
        kubelet(driver="cgroupfs"), runtime=structs.replace(HEALTHY.runtime, runc="1.1.5")
    )
    found = {each.id: each for each in examine(facts) if each.result is not CheckResult.OK}
    assert set(found) == {"cgroup-driver", "runtime-version"}
    assert found["cgroup-driver"].result is CheckResult.WARN
    assert found["cgroup-driver"].text == (
        "kubelet's configuration names the cgroup driver cgroupfs, the runtime uses systemd: kubelet 1.31 and"
        " later use the runtime's, an older one fails"
    )
    assert found["cgroup-driver"].advice == "set cgroupDriver of kubelet to systemd"
    assert "if the cgroup driver is systemd" not in found["runtime-version"].text


def test_a_healthy_node_has_no_finding() -> None:
    assert unusual(HEALTHY) == {}
    assert [each.id for each in examine(HEALTHY)] == list(CHECKS)
    assert not any(each.advice for each in examine(HEALTHY))


NO_RUNTIME = {"runtime": "fail", "runtime-version": "skip", "cgroup-driver": "skip"}
DOWN = {"daemon": "fail", "kubelet-calls": "skip", "daemon-problems": "skip", "open-files": "skip"}


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (node_with(configuration=ConfigurationFacts(refused="cannot use c.yaml")), {"configuration": "fail"}),
        (
            node_with(configuration=ConfigurationFacts(exposed=("kubelet.keyFile: x",))),
            {"exposed-files": "warn"},
        ),
        (node_with(machine="cannot read the machine"), {"machine": "fail"}),
        (node_with(partly_reserved="CPU 4 is on a core with a reserved CPU"), {"machine": "warn"}),
        (node_with(cgroups=CgroupFacts("cannot find the controller")), {"cgroup-cpuset": "fail"}),
        (node_with(cgroups=CgroupFacts(without_cpuset=("/kubepods.slice",))), {"cgroup-cpuset": "fail"}),
        (node_with(runtime=RuntimeFacts("cannot ask")), NO_RUNTIME),
        (node_with(runtime=RuntimeFacts("", "containerd 1.7", "")), {"cgroup-driver": "skip"}),
        (node_with(runtime=RuntimeFacts("", "containerd 2.1", "cgroupfs")), {"cgroup-driver": "warn"}),
        (kubelet(driver=""), {"cgroup-driver": "skip"}),
        (runtime(version="containerd v1.5.18"), {"runtime-version": "fail"}),
        (runtime(version="containerd 1.6.0~rc1"), {}),
        (runtime(version="cri-o 1.5.0"), {}),
        (runtime(version="containerd unknown"), {}),
        (runtime(runc="1.1.5"), {"runtime-version": "warn"}),
        (runtime(runc="1.1.5+ds1", driver=""), {"runtime-version": "warn", "cgroup-driver": "skip"}),
        (runtime(runc="1.1.6"), {}),
        (structs.replace(runtime(runc="1.1.5"), cgroups=CgroupFacts(version=1)), {}),
        (runtime(runc="1.1.5", driver="cgroupfs"), {"cgroup-driver": "warn"}),
        (node_with(state=StateFacts(free_bytes=1 << 30, unexamined="there is none")), {"ledger": "skip"}),
        (daemon(clients=0, pods=None), {"kubelet-calls": "skip"}),
        (node_with(denials=None), {"denials": "skip"}),
        (node_with(denials=2), {"denials": "warn"}),
        (kubelet(effective=CONFIG), {"kubelet-endpoint": "fail"}),
        (kubelet(effective=FLAGS), {"kubelet-endpoint": "fail"}),
        (kubelet(instance=INSTANCE), {"kubelet-endpoint": "warn"}),
        (kubelet(instance=INSTANCE, effective=CONFIG), {"kubelet-endpoint": "fail"}),
        (kubelet(effective=None), {"kubelet-endpoint": "fail"}),
        (kubelet(instance=structs.replace(INSTANCE, endpoint=OURS), effective=None), NO_ENDPOINT),
        (kubelet(overridden=(CONFIG,)), {}),
        (kubelet(running=EndpointSetting("the running kubelet", THEIRS)), {"kubelet-endpoint": "fail"}),
        (kubelet(effective=None, running=EndpointSetting("the running kubelet", OURS)), {}),
        (kubelet(directory=""), {"kubelet-endpoint": "skip", "kubelet-managers": "skip"}),
        (node_with(attach=AttachFacts("/s/attach")), {}),
        (node_with(attach=AttachFacts("/s/attach", "cannot read it")), {"attach-journal": "fail"}),
        (node_with(attach=AttachFacts("/s/attach", unfinished=True)), {"attach-journal": "fail"}),
        (
            node_with(attach=AttachFacts("/s/attach", changed_by_others=("/etc/k",))),
            {"attach-journal": "warn"},
        ),
        (node_with(attach=AttachFacts("/s/attach", rescue=False)), {"attach-journal": "warn"}),
        (kubelet(cpu_policy="static"), {"kubelet-managers": "warn"}),
        (kubelet(memory_policy="Static"), {"kubelet-managers": "warn"}),
        (daemon(problem="no process listens", clients=0, open_files=None), DOWN),
        (daemon(not_ready=("the state has not been compared",)), {"daemon": "fail"}),
        (daemon(clients=0), {"kubelet-calls": "fail"}),
        (daemon(clients=0, pods=0), {"kubelet-calls": "skip"}),
        (daemon(last_call_s=WITHOUT_CALLS_S), {}),
        (daemon(last_call_s=WITHOUT_CALLS_S + 1), {"kubelet-calls": "warn"}),
        (daemon(last_call_s=None), {"kubelet-calls": "warn"}),
        (daemon(problems=("a", "b")), {"daemon-problems": "warn"}),
        (daemon(open_files=1024), {}),
        (daemon(open_files=1023), {"open-files": "fail"}),
        (node_with(writers=("process koordlet",)), {"other-writers": "warn"}),
        (node_with(hooks=("/etc/x.py: it can be written by others",)), {"hook-files": "fail"}),
        (node_with(state=StateFacts(free_bytes=WARN_BELOW_BYTES)), {}),
        (node_with(state=StateFacts(free_bytes=WARN_BELOW_BYTES - 1)), {"disk": "warn"}),
        (node_with(state=StateFacts(free_bytes=FAIL_BELOW_BYTES)), {"disk": "warn"}),
        (node_with(state=StateFacts(free_bytes=FAIL_BELOW_BYTES - 1)), {"disk": "fail"}),
        (node_with(state=StateFacts(free_bytes=1 << 30, read_only=True)), {"disk": "fail"}),
        (node_with(state=StateFacts(problem="cannot look")), {"disk": "fail", "ledger": "skip"}),
        (node_with(state=StateFacts()), {"disk": "skip"}),
        (node_with(state=StateFacts(free_bytes=1 << 30, ledger="damaged")), {"ledger": "fail"}),
        (node_with(state=StateFacts(free_bytes=1 << 30, set_aside=("a.bad-1",))), {"ledger": "warn"}),
        (node_with(sockets=(SocketFacts("/s", "others can write"),)), {"socket-modes": "fail"}),
        (node_with(sockets=()), {"socket-modes": "skip"}),
        (node_with(now=EARLIEST_CLOCK_S - 1), {"clock": "fail"}),
        (node_with(certificates=(CertificateFacts("/c", "no certificate"),)), {"certificates": "fail"}),
        (node_with(certificates=(CertificateFacts("/c", ends=NOW),)), {"certificates": "fail"}),
        (
            node_with(certificates=(CertificateFacts("/c", ends=NOW + EXPIRES_S - 1),)),
            {"certificates": "warn"},
        ),
        (node_with(certificates=()), {"certificates": "skip"}),
    ],
)
def test_one_fault_is_found_by_its_check_alone(facts: DoctorFacts, found: dict[str, str]) -> None:
    assert unusual(facts) == found
    for each in examine(facts):
        needs_advice = each.result in (CheckResult.FAIL, CheckResult.WARN)
        assert bool(each.advice) is needs_advice, each
        assert each.text


def test_the_text_names_the_findings() -> None:
    texts = {each.id: each.text for each in examine(kubelet(effective=FLAGS))}
    assert texts["kubelet-endpoint"] == f"/var/lib/kubelet/kubeadm-flags.env names {THEIRS}"
    texts = {each.id: each.text for each in examine(kubelet(overridden=(CONFIG,)))}
    no_effect = f"/var/lib/kubelet/config.yaml names {THEIRS}, which has no effect"
    assert texts["kubelet-endpoint"] == f"kubelet uses {OURS}; {no_effect}"
    texts = {each.id: each.text for each in examine(daemon(problems=("a", "b", "c")))}
    assert texts["daemon-problems"] == "a and 2 more"
    texts = {each.id: each.text for each in examine(daemon(problems=("a",)))}
    assert texts["daemon-problems"] == "a"


def test_an_ignored_check_is_skipped() -> None:
    facts = kubelet(effective=None)
    found = {each.id: each for each in examine(facts, ("kubelet-endpoint",))}
    assert found["kubelet-endpoint"].result is CheckResult.SKIP
    assert found["kubelet-endpoint"].text.startswith("ignored: no file in")
    assert [each for each in found.values() if each.result is CheckResult.FAIL] == []
