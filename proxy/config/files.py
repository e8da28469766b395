"""The files that a configuration names: which are secret, and which other users could change.

Other programs write them (a token is renewed, kubelet rewrites its configuration), so a file that is open to
other users is reported, but used. Only the configuration itself is refused in that case (``load``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from proxy.config.schema import Config
from proxy.permissions import TrustCheck, reader_problem


def exposed_files(config: Config) -> list[str]:
    """Name secret files that other users can read, and trusted files that other users can write.

    Returns:
        Why the settings of the cluster are ignored, if they are. Then one sentence for each file, which
        starts with the key and ends with the remedy. A file that cannot be examined is left out, because the
        code that reads it reports the error.
    """
    permissions, kubelet = TrustCheck(), config.kubelet
    secret = {"kubelet.tokenFile": kubelet.token_file, "kubelet.keyFile": kubelet.key_file}
    if kubelet.key_file is None:
        secret["kubelet.certFile"] = kubelet.cert_file
    public = {
        "kubelet.caFile": kubelet.ca_file,
        "kubelet.certFile": kubelet.cert_file,
        "kubelet.configFile": kubelet.config_file,
        "koordinator.nodeObject": config.koordinator.node_object,
    }
    problem_of_key: dict[str, str] = {}
    for files, hidden in ((secret, True), (public, False)):
        for name, path in files.items():
            if path is not None:
                for problem in _problems(permissions, path, secret=hidden):
                    problem_of_key.setdefault(name, f"{name}: {problem}")
    return [*([config.cluster_fault] if config.cluster_fault else []), *problem_of_key.values()]


def _problems(permissions: TrustCheck, path: Path, *, secret: bool) -> Iterator[str]:
    try:
        status = path.stat()
        problems = [reader_problem(path, status)] if secret else []
        problems += [permissions.path_problem(path, sticky=True), permissions.writer_problem(path, status)]
    except OSError:
        return
    yield from filter(None, problems)
