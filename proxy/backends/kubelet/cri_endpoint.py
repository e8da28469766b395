"""Where kubelet is configured to find its container runtime, by the files that override ``config.yaml``.

Theory. kubelet's flag ``--container-runtime-endpoint`` wins over ``containerRuntimeEndpoint`` in its
configuration file (kubernetes v1.36 cmd/kubelet/app/server.go,
kubeletConfigFlagPrecedence). kubeadm wrote that flag to ``kubeadm-flags.env``; since its feature
NodeLocalCRISocket (KEP-4656) it writes ``instance-config.yaml`` and patches it over ``config.yaml`` at init,
join and upgrade.
"""

from __future__ import annotations

import re
from pathlib import Path

from proxy.backends.kubelet.small_file import read_small

LARGEST = 64 << 10
_FILES = (
    ("kubeadm-flags.env", re.compile(r"--container-runtime-endpoint[=\s]+([^\s\"']+)")),
    ("instance-config.yaml", re.compile(r"^\s*containerRuntimeEndpoint:\s*[\"']?([^\s\"'#]+)", re.MULTILINE)),
    ("config.yaml", re.compile(r"^\s*containerRuntimeEndpoint:\s*[\"']?([^\s\"'#]+)", re.MULTILINE)),
)


def other_endpoints(directory: Path, ours: Path) -> list[tuple[Path, str]]:
    """Return the files that name another endpoint than ours, the one that wins first; blocks on the disk.

    Args:
        directory: kubelet's directory, usually ``/var/lib/kubelet``.
        ours: The socket that kubelet should use.
    """
    found: list[tuple[Path, str]] = []
    for name, pattern in _FILES:
        try:
            text = read_small(str(directory / name), LARGEST)[0].decode("utf-8", "replace")
        except (OSError, ValueError):
            continue
        match = pattern.search(text)
        if match is not None and match[1].removeprefix("unix://") != str(ours):
            found.append((directory / name, match[1]))
    return found
