"""Find the files in which k3s and RKE2 name the endpoint of the kubelet that they start.

Theory (docs.k3s.io and docs.rke2.io, Configuration Options). Both read ``config.yaml``, then
``config.yaml.d/*.yaml`` by name. Of several files that have a key the last one counts, and a key that ends in
``+`` adds to a list. ``kubelet-arg`` is a list of kubelet's flags, without dashes; a flag wins over the
configuration that k3s writes for kubelet (k3s v1.32 pkg/daemons/agent/agent_linux.go, kubeletArgsAndConfig).
``container-runtime-endpoint`` is another setting: where it is given, k3s does not start the containerd that
it has inside (pkg/agent/run.go, startCRI). So it is left alone: it names the runtime behind topoproxy.
"""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from proxy.backends.kubelet.unit_files import Span, read_span, unit_sources

EMBEDDED = "unix:///run/k3s/containerd/containerd.sock"
"""The containerd of k3s and of RKE2."""
UNITS = {
    "k3s.service": "k3s",
    "k3s-agent.service": "k3s",
    "rke2-server.service": "rke2",
    "rke2-agent.service": "rke2",
}
OWN_FILE = "zz-topoproxy.yaml"
_WANTS = "etc/systemd/system/multi-user.target.wants"
_ARGUMENT = re.compile(r"^[^#\n]*?\bcontainer[-_]runtime[-_]endpoint=([^\s\"',\]]+)", re.MULTILINE)
_RUNTIME = re.compile(r"^container-runtime-endpoint[ \t]*:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)


class RancherFiles(Struct, frozen=True):
    """How kubelet is configured inside k3s or RKE2.

    Attributes:
        unit: The unit that runs it.
        argument: The endpoint in ``kubelet-arg``; None where no file has it.
        runtime: The endpoint that kubelet is given otherwise.
        own_file: The file that can add a flag, read after all others.
    """

    unit: str
    argument: Span | None
    runtime: str
    own_file: Path


def rancher_files(root: Path) -> RancherFiles | None:
    """Find the files of k3s or RKE2; None where neither is installed; blocks on the disk.

    Args:
        root: Used in place of ``/``.
    """
    units = [unit for unit in UNITS if unit_sources(root, unit)]
    if not units:
        return None
    # RKE2 installs both of its units, and enables one.
    unit = next((unit for unit in units if (root / _WANTS / unit).is_symlink()), units[0])
    config = Path("etc/rancher") / UNITS[unit] / "config.yaml"
    drop_ins = root / f"{config}.d"
    argument, runtime = None, EMBEDDED
    for path in (root / config, *sorted(drop_ins.glob("*.yaml"))):
        whole = read_span(path)
        for match in _ARGUMENT.finditer(whole.text if whole else ""):
            assert whole is not None
            argument = whole.part(*match.span(1))
        for match in _RUNTIME.finditer(whole.text if whole else ""):
            runtime = match[1]
    return RancherFiles(unit, argument, runtime, Path("/") / f"{config}.d" / OWN_FILE)
