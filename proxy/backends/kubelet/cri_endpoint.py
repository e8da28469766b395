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
_FLAG = re.compile(r"--container-runtime-endpoint[=\s]+([^\s\"']+)")
_FILES = (
    ("kubeadm-flags.env", _FLAG),
    ("instance-config.yaml", re.compile(r"^\s*containerRuntimeEndpoint:\s*[\"']?([^\s\"'#]+)", re.MULTILINE)),
    ("config.yaml", re.compile(r"^\s*containerRuntimeEndpoint:\s*[\"']?([^\s\"'#]+)", re.MULTILINE)),
)


def other_endpoints(directory: Path, ours: Path) -> list[tuple[Path, str]]:
    """Return the files that name another endpoint than ours, the one that wins first; blocks on the disk.

    Args:
        directory: kubelet's directory, usually ``/var/lib/kubelet``.
        ours: The socket that kubelet should use.
    """
    return [
        (path, endpoint)
        for path, endpoint in named_endpoints(directory)
        if endpoint.removeprefix("unix://") != str(ours)
    ]


def named_endpoints(directory: Path) -> list[tuple[Path, str]]:
    """Return the files that name a runtime endpoint, the one that wins first; blocks on the disk."""
    found: list[tuple[Path, str]] = []
    for name, pattern in _FILES:
        try:
            text = read_small(str(directory / name), LARGEST)[0].decode("utf-8", "replace")
        except (OSError, ValueError):
            continue
        match = pattern.search(text)
        if match is not None:
            found.append((directory / name, match[1]))
    return found


def running_endpoint(procfs: Path) -> str | None:
    """Return the endpoint that the command line of the running kubelet names; None where there is none."""
    try:
        entries = [entry for entry in procfs.iterdir() if entry.name.isdigit()]
    except OSError:
        return None
    for entry in entries:
        try:
            words = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue  # it has ended meanwhile
        if Path(words[0]).name == "kubelet" and (match := _FLAG.search(" ".join(words))):
            return match[1]
    return None
