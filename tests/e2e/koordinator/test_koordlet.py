"""koordlet's hook server as a hook of the daemon: it registers itself, and valid responses take effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cri import cpuset_of, online
from daemon import DaemonProcess, ModeledNode
from private_runtime import PrivateRuntime, wait_for

from proxy.config.load import parse
from proxy.frontends.hookserver.registration import registration
from proxy.model.idset import CpuSet

if TYPE_CHECKING:
    from peers import KoordletHookServer, RuntimeProxy

pytestmark = pytest.mark.e2e

FIRST, LAST = CpuSet([min(online())]), CpuSet([max(online())])
REST = online() - LAST
GPUS = {"scheduling.koordinator.sh/device-allocated": '{"gpu":[{"minor":1},{"minor":3}]}'}


def config_of(cri: Any, container: str) -> Any:
    """Return the config in the runtime's record of the create request."""
    return json.loads(cri.status(container, verbose=True).info["info"])["config"]


def envs_of(cri: Any, container: str) -> list[tuple[str, str]]:
    """Return the environment in the runtime's record of the create request, in order."""
    return [(entry["key"], entry["value"]) for entry in config_of(cri, container).get("envs") or ()]


def in_use(daemon: DaemonProcess, name: str = "koordlet") -> None:
    """Wait until the daemon uses a hook server."""

    def used() -> bool:
        return f"hook loaded hook={name} " in daemon.log.read_text()

    wait_for(f"hook {name} to be in use", used, limit=30)


@pytest.fixture
def start_daemon_with_koordlet(
    start_serving_daemon: Callable[..., DaemonProcess],
    start_koordlet: Callable[..., KoordletHookServer],
    runtime: PrivateRuntime,
    tmp_path: Path,
) -> Any:
    """Start a daemon, and a hook server of koordlet that registers itself with it."""

    def make(shared: str, **options: str) -> tuple[DaemonProcess, KoordletHookServer]:
        daemon = start_serving_daemon(hooks={"timeout": "5s"})
        koordlet = start_koordlet(tmp_path / "servers", shared=shared, **options)
        in_use(daemon)
        return daemon, koordlet

    yield make
    runtime.clear()


def test_koordlets_responses_agree_with_the_daemons_placement(
    start_daemon_with_koordlet: Any, runtime: PrivateRuntime
) -> None:
    """For each class, the response of koordlet's plugin equals the daemon's decision or is a subset of it."""
    daemon, _ = start_daemon_with_koordlet(str(online()))
    with daemon.client() as cri:
        node = ModeledNode(runtime, daemon, cri)
        for kind in ("ls", "be", "burstable", "besteffort"):
            node.spawn(kind)
        node.wait_until_settled()
        lse = node.spawn("lse", LAST)
        resources = config_of(cri, lse)["linux"]["resources"]
        assert (resources["cpuset_cpus"], resources["cpu_quota"]) == (str(LAST), -1)
        node.wait_until_settled()
        node.remove(lse)
        node.wait_until_settled()
        assert "koordlet" in json.dumps(daemon.status()["hooks"])


def test_koordlets_shared_pool_narrows_the_daemons(
    start_daemon_with_koordlet: Any, runtime: PrivateRuntime
) -> None:
    daemon, _ = start_daemon_with_koordlet(str(FIRST))
    with daemon.client() as cri:
        pod = cri.run_pod("ls", labels={"koordinator.sh/qosClass": "LS"})
        container = cri.run(pod, cpu_shares=512)
        assert cpuset_of(container).cpus == FIRST
        cri.update(container, cpuset_cpus=str(online()), cpu_shares=600)
        assert cpuset_of(container).cpus == FIRST


def test_koordlet_adds_a_variable_and_the_rest_of_the_request_is_kept(
    start_daemon_with_koordlet: Any, runtime: PrivateRuntime
) -> None:
    """koordlet's GPU plugin adds a variable; the other variables keep their order and bytes."""
    daemon, _ = start_daemon_with_koordlet(str(online()))
    requested = [(f"KEY_{number}", f"a=b;{number}") for number in (3, 1, 2, 9, 0)]
    with daemon.client() as cri, runtime.client() as direct:
        found = []
        for client in (cri, direct):
            pod = client.run_pod(f"pod-{len(found)}", uid="u", annotations=GPUS)
            request = client.create_request(pod, cpu_shares=512, oom_score_adj=900)
            for key, value in requested:
                request.config.envs.add(key=key, value=value.encode())
            container = client.method("CreateContainer")(request, timeout=30).container_id
            found.append(config_of(direct, container))
    ours, plain = found
    envs = [(entry["key"], entry["value"]) for entry in ours.pop("envs")]
    assert envs == [*requested, ("NVIDIA_VISIBLE_DEVICES", "1,3")]
    plain.pop("envs")
    for each in found:
        for name in ("cpuset_cpus", "cpuset_mems"):
            each["linux"]["resources"].pop(name, None)
    assert ours == plain  # including oom_score_adj, which is missing in the response of the hook


def test_koordlet_cannot_give_away_owned_cpus(
    start_daemon_with_koordlet: Any, runtime: PrivateRuntime
) -> None:
    """koordlet's pool may be outdated; an owner that it does not know keeps its CPUs."""
    daemon, _ = start_daemon_with_koordlet(str(LAST))
    with daemon.client() as cri:
        node = ModeledNode(runtime, daemon, cri)
        lse = node.spawn("lse", LAST)
        pod = cri.run_pod("ls", labels={"koordinator.sh/qosClass": "LS"})
        container = cri.run(pod, cpu_shares=512)
        assert (cpuset_of(lse).cpus, cpuset_of(container).cpus) == (LAST, REST)
        assert "not among those that hooks may give" in daemon.log.read_text()
        cri.update(container, cpuset_cpus=str(LAST))
        assert (cpuset_of(lse).cpus, cpuset_of(container).cpus) == (LAST, REST)
        node.remove(lse)


def test_koordlet_is_used_again_after_a_restart(
    start_daemon_with_koordlet: Any, runtime: PrivateRuntime, tmp_path: Path
) -> None:
    daemon, koordlet = start_daemon_with_koordlet(str(FIRST), policy="Ignore")
    with daemon.client() as cri:
        pod = cri.run_pod("ls", labels={"koordinator.sh/qosClass": "LS"})
        assert cpuset_of(cri.run(pod, "a", cpu_shares=512)).cpus == FIRST
        koordlet.stop()
        assert cpuset_of(cri.run(pod, "b", cpu_shares=512)).cpus == online()
        koordlet.start(shared=str(FIRST), policy="Ignore")

        def used() -> bool:
            used.number += 1  # type: ignore[attr-defined]
            container = cri.run(pod, f"c{used.number}", cpu_shares=512)  # type: ignore[attr-defined]
            return cpuset_of(container).cpus == FIRST

        used.number = 0  # type: ignore[attr-defined]
        wait_for("koordlet's response to take effect again", used, limit=60, pause=0.5)


def test_koordinators_proxy_the_daemon_and_koordlet_in_a_chain(
    start_daemon_with_koordlet: Any,
    make_runtime_proxy: Callable[..., RuntimeProxy],
    runtime: PrivateRuntime,
    tmp_path: Path,
) -> None:
    """Koordinator's proxy calls the daemon, and the daemon calls koordlet: each event passes the chain."""
    daemon, _ = start_daemon_with_koordlet(str(FIRST))
    peer = make_runtime_proxy()
    config = parse((daemon.directory / "config.yaml").read_text(), "test")
    (peer.servers / "topoproxy.json").write_text(registration(config))
    peer.start(runtime.cgroup)
    with peer.client(runtime.cgroup) as cri:
        labels = {"koordinator.sh/qosClass": "LS"}
        container = cri.run(cri.run_pod("ls", labels=labels, annotations=GPUS), cpu_shares=512)
        assert cpuset_of(container).cpus == FIRST
        assert ("NVIDIA_VISIBLE_DEVICES", "1,3") in envs_of(cri, container)
        node = ModeledNode(runtime, daemon, cri)
        lse = node.spawn("lse", LAST)
        node.check()
        assert cpuset_of(lse).cpus == LAST
