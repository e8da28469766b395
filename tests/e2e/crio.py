"""A private CRI-O with real cgroups, in place of the private containerd.

The differences from containerd: a container has a cgroup as soon as it is created (runc makes it before CRI-O
answers CreateContainer), the names of cgroups have the prefix ``crio-`` under both drivers, the monitor of
each container has a sibling cgroup, a sandbox has no process unless the pod needs one, and only the CRI
reports events.

``build_crio.sh`` builds the programs; ``TOPOPROXY_CRIO`` names their directory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tarfile
import tempfile
from pathlib import Path

import images
from cri import cgroup_of
from private_runtime import PATH, PrivateRuntime, write_toml

DIRECTORY = os.environ.get("TOPOPROXY_CRIO") or ""
"""A directory with crio, pinns and optionally a runtime; if it is empty, the tests run on containerd."""
PROGRAMS = ("crio", "pinns")
HOSTS = ("localhost", "docker.io", "gcr.io", "registry.k8s.io")

RUNC = r"""#!/bin/sh
# CRI-O requests a low oom_score_adj, which a test machine is often not permitted to set.
read -r now </proc/self/oom_score_adj
for arg; do
    [ ! -f "$arg/config.json" ] ||
        sed -i -E 's/("oomScoreAdj": *)-[0-9]+/\1'"$now"'/' "$arg/config.json"
done
exec {runc} "$@"
"""


def crio_skip_reason() -> str:
    """Return why this host cannot run CRI-O; an empty string if it can."""
    missing = [name for name in PROGRAMS if not Path(DIRECTORY, name).is_file()]
    if missing:
        return (
            f"no {' and '.join(missing)} in {DIRECTORY} (TOPOPROXY_CRIO; tests/e2e/build_crio.sh builds them)"
        )
    return "" if shutil.which("conmon") else "not installed: conmon"


class PrivateCrio(PrivateRuntime):
    """One private CRI-O."""

    name = "crio"
    monitor = "conmon"

    def __init__(self, directory: Path, driver: str = "cgroupfs") -> None:
        super().__init__(directory)
        self.driver = driver
        self._attach: list[str] = []

    def _bring_images(self, archive: Path) -> None:
        """Pull the images: to copy them into CRI-O's storage would need another tool."""
        with self.client() as cri:
            for name in (images.PAUSE, images.BUSYBOX):
                cri.pull(name)

    def _serve_own_images(self) -> None:
        """Make the registry serve the images that containerd would import."""
        directory = self.directory / "images"
        names = json.loads((directory / "names.json").read_text())
        with tarfile.open(directory / "images.tar") as tar:
            index = tar.extractfile("index.json")
            assert index is not None
            for entry in json.load(index)["manifests"]:
                name = entry["annotations"]["io.containerd.image.name"].removeprefix("localhost/")
                names[name] = {"digest": entry["digest"], "size": entry["size"]}
        (directory / "names.json").write_text(json.dumps(names))
        shutil.copytree(directory / "local", directory / "blobs", dirs_exist_ok=True)

    def clear(self) -> None:
        """Remove all pods; end their processes first, for which CRI-O would wait a grace period."""
        with self.client() as cri:
            for container in cri.list():
                cri.stop(container.id)
            for pod in cri.list_pods():
                if (group := cgroup_of(pod.id)) is not None:
                    for pid in (group / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
        super().clear()

    def stop(self) -> None:
        """Stop the runtime, and remove the directory for attach sockets."""
        super().stop()
        for directory in self._attach:
            shutil.rmtree(directory, ignore_errors=True)

    def _configure(self) -> None:
        self._serve_own_images()
        for name in ("policies", "exits", "empty"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        wrapper = self.directory / "runc-here"
        wrapper.write_text(RUNC.format(runc=shutil.which("runc", path=os.pathsep.join([DIRECTORY, PATH]))))
        wrapper.chmod(0o755)
        own = str(self.directory)
        # CRI-O connects to DIRECTORY/ID/attach (internal/oci/runtime_oci.go): 71 of the 107 bytes of a path.
        self._attach.append(tempfile.mkdtemp(prefix="crio-", dir="/tmp"))
        tables: dict[str, dict[str, object]] = {
            "crio": {
                "root": f"{own}/root",
                "runroot": f"{own}/runroot",
                "storage_driver": "vfs",  # works on every file system, and the images are tiny
                "log_dir": f"{own}/log",
                "version_file": f"{own}/version",
                "clean_shutdown_file": f"{own}/clean.shutdown",
                "internal_wipe": False,
            },
            "crio.api": {"listen": str(self.socket), "stream_address": "127.0.0.1"},
            "crio.runtime": {
                "cgroup_manager": self.driver,
                "apparmor_profile": "unconfined",
                "seccomp_profile": "",
                "hooks_dir": [f"{own}/empty"],
                "container_exits_dir": f"{own}/exits",
                "container_attach_socket_dir": self._attach[-1],
                "namespaces_dir": f"{own}/ns",
                "pinns_path": f"{DIRECTORY}/pinns",
                "enable_criu_support": False,
                # Without nft a host port ends CRI-O 1.34 (internal/hostport/meta_hostport_manager.go, Add).
                "disable_hostport_mapping": shutil.which("nft") is None,
                "default_runtime": "runc",
                "irqbalance_config_file": "",
                "irqbalance_config_restore_file": "disable",
            },
            "crio.runtime.runtimes.runc": {
                "runtime_path": str(wrapper),
                "runtime_root": f"{own}/runc",
                "monitor_path": shutil.which("conmon") or "conmon",
                "monitor_cgroup": "pod" if self.driver == "cgroupfs" else "system.slice",
            },
            "crio.image": {
                "pause_image": images.PAUSE,
                "pause_command": "",
                "signature_policy": f"{own}/policy.json",
                "signature_policy_dir": f"{own}/policies",
            },
            "crio.network": {"network_dir": f"{own}/cni", "plugin_dirs": ["/usr/lib/cni"]},
            "crio.nri": {"enable_nri": False},
        }
        write_toml(self.directory / "crio.conf", tables)
        (self.directory / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        to = 'location = "127.0.0.1:5000"\ninsecure = true\n'
        hosts = [f'[[registry]]\nprefix = "{host}"\n{to}' for host in HOSTS]
        (self.directory / "registries.conf").write_text("\n".join(hosts))

    def _command(self) -> list[str]:
        own = str(self.directory)
        registries = [f"--registries-conf={own}/registries.conf", f"--registries-conf-dir={own}/empty"]
        return [
            f"{DIRECTORY}/crio",
            "--config",
            f"{own}/crio.conf",
            "--config-dir",
            f"{own}/empty",
            *registries,
        ]
