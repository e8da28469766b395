"""The scenario of a takeover from a real kubelet's static CPU manager and back, on 4 NUMA nodes.

kubelet has pinned a pod. The takeover starts, a new pod gets other CPUs than kubelet assigns, and kubelet is
started under ``none`` with the file that ``finish`` wrote, then under ``static`` with the one of ``revert``.
No container may move or restart, and no kubelet may end because of its state file.

    python3 vm_takeover.py cgroupfs|systemd

Needs /in/kubelet (1.34 or later).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vm_guest import ALL, DIRECTORY, LONG_S, GuestDaemon, step, wait
from vm_kubelet import MANIFESTS, ROOT, KubeletNode, container, kubelet_settings

from proxy.backends.kubelet.checkpoints import HeldCpus, held_cpus, read_cpu_checkpoint
from proxy.model.idset import CpuSet

CONFIG, STATE, LOG = Path("/etc/kubelet/config.yaml"), ROOT / "cpu_manager_state", Path("/out/kubelet.log")
RECONCILE_S = 5
SETTINGS: dict[str, object] = {
    # kubelet picks the lowest free CPUs; with more reserved CPUs the daemon picks others.
    "reservedSystemCPUs": "0-7",
    "cpuManagerPolicy": "none",
    "kubelet": {"stateDir": str(ROOT), "configFile": str(CONFIG)},
}
REFUSALS = ("differs from state checkpoint policy", "could not restore state from checkpoint", "corrupted")


class TakeoverNode(KubeletNode):
    """kubelet with a configurable CPU manager policy."""

    def start_with_policy(self, policy: str) -> None:
        """Start kubelet, and check that it accepts its state file."""
        MANIFESTS.mkdir(parents=True, exist_ok=True)
        Path("/var/log/pods").mkdir(parents=True, exist_ok=True)
        settings = kubelet_settings(self.driver, signed=False) | {
            "cpuManagerPolicy": policy,
            "cpuManagerReconcilePeriod": f"{RECONCILE_S}s",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "featureGates": {},
        }
        CONFIG.write_text(json.dumps(settings))
        self._launch()

        def answers() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                step(f"kubelet ended: {LOG.read_text()[-300:]}")
                self._launch()
            return self.has_its_pods()

        took = wait("kubelet to answer", answers, LONG_S)
        log = LOG.read_text()
        assert not any(error in log for error in REFUSALS), log[-3000:]
        step(f"kubelet answers under {policy} after {took:.1f} s")

    def uid_of(self, name: str) -> str:
        """The uid by which the runtime, and so kubelet's file, knows a pod."""
        (found,) = {
            c.labels["io.kubernetes.pod.uid"]
            for c in self.direct.list()
            if c.labels.get("io.kubernetes.pod.name") == f"{name}-bed"
        }
        return str(found)

    def takeover(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run ``topoproxy takeover`` and print its output."""
        done = self.daemon.cli(
            "takeover", *args, "--timeout", "100", "--admin", f"unix://{DIRECTORY / 'admin.sock'}"
        )
        print(f"$ topoproxy takeover {' '.join(args)}\n{done.stdout}{done.stderr}", flush=True)
        return done


def state() -> tuple[str, HeldCpus, dict[str, Any]]:
    """kubelet's state file: policy, sets, and the raw fields; its checksum must be right."""
    found = read_cpu_checkpoint(STATE.read_text())
    assert found.version == 2, STATE.read_text()
    return found.policy, held_cpus(found), dict(found.fields)


def held_by(node: TakeoverNode, name: str) -> CpuSet:
    """Return the CPUs of a pod's container in kubelet's state file; empty if there are none."""
    uid = node.uid_of(name)
    return state()[1].held.get(uid, {}).get("main", CpuSet())


def main() -> None:
    version = subprocess.check_output(["/in/kubelet", "--version"], text=True).strip()
    step(f"{version}, CPUs {ALL}")
    node = TakeoverNode(sys.argv[1], GuestDaemon(**SETTINGS))
    node.start_with_policy("static")
    node.add("old", container("main", "4"))
    node.add("part", container("main", "250m"))
    old = node.place("old/main")
    assert (len(old.cpus), held_by(node, "old")) == (4, old.cpus), old
    wait("the shared pool to leave the CPUs", lambda: node.place("part/main").cpus == ALL - old.cpus)
    step(f"kubelet assigned {old.cpus} to old")

    plan = node.takeover("plan")
    assert plan.returncode == 0
    assert "default/old-bed/main (static pod)" in plan.stdout
    assert node.takeover("start").returncode == 0
    node.add("new", container("main", "2"))
    new = node.place("new/main")
    assert len(new.cpus) == 2
    assert new.cpus.isdisjoint(CpuSet(range(8))), new
    named = held_by(node, "new")
    assert named, "kubelet has assigned CPUs in its state file"
    assert named != new.cpus, new
    time.sleep(3 * RECONCILE_S)  # kubelet's reconcile sends its own cpusets, which must not take effect
    everyone = node.snapshot()
    assert (everyone["old/main"][1].cpus, everyone["new/main"][1].cpus) == (old.cpus, new.cpus), everyone
    step(f"new has {new.cpus}, kubelet named {named}, and its reconcile changed nothing")

    assert node.takeover("finish", "--with-running").returncode == 1  # kubelet runs
    node.stop_kubelet()
    assert node.takeover("finish").returncode == 1  # old allocations are left
    assert node.takeover("finish", "--with-running").returncode == 0
    assert STATE.read_text() == '{"policyName":"none","defaultCpuSet":"","checksum":1353318690}'
    node.start_with_policy("none")
    time.sleep(15)  # more than kubelet's sync period of 10 s
    assert node.snapshot() == everyone, (everyone, node.snapshot())
    assert state()[0] == "none"
    node.daemon.kill9()
    node.daemon.start()
    wait("the daemon to be ready", lambda: bool(node.daemon.status()["ready"]))
    node.add("later", container("main", "2"))
    later = node.place("later/main")
    assert len(later.cpus) == 2
    assert later.cpus.isdisjoint(CpuSet(range(8)) | new.cpus), later
    step(f"under none: the same containers in the same places, and later has {later.cpus}")

    everyone = node.snapshot()
    assert node.takeover("status").returncode == 0
    node.stop_kubelet()
    assert node.takeover("revert").returncode == 0
    for name, place in (("old", old), ("new", new), ("later", later)):
        assert held_by(node, name) == place.cpus, (name, STATE.read_text())
    node.start_with_policy("static")
    time.sleep(3 * RECONCILE_S)
    assert node.snapshot() == everyone, (everyone, node.snapshot())
    for name, place in (("old", old), ("new", new), ("later", later)):
        assert held_by(node, name) == place.cpus, (name, STATE.read_text())
    node.add("last", container("main", "2"))
    last = node.place("last/main")
    assert held_by(node, "last") == last.cpus, (last, STATE.read_text())
    assert last.cpus.isdisjoint(old.cpus | new.cpus | later.cpus), last
    step(f"back under static: the same containers in the same places, and kubelet gave {last.cpus} to last")
    assert not any(error in LOG.read_text() for error in REFUSALS)
    node.stop_kubelet()
    assert node.daemon.stop() == 0
    step("the scenario ends well")


if __name__ == "__main__":
    main()
