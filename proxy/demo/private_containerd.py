"""A containerd of our own in a temporary directory, for machines where none runs.

It lives in a mount namespace of its own, so its mounts end with it. Pods use the host's network, so no CNI is
needed, and nothing is pulled. Its cgroups are the machine's.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Self

from proxy.demo.client import CriClient
from proxy.demo.image import IMAGE, write_image
from proxy.model.errors import TopoproxyError, UnavailableError

_CONFIG = """\
version = 2
root = "{here}/root"
state = "{here}/state"
oom_score = 0
disabled_plugins = ["io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "{here}/containerd.sock"
[debug]
  address = "{here}/debug.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{here}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "{here}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        Root = "{here}/runc"
        SystemdCgroup = false
"""

_PROGRAMS = {"containerd": "containerd", "ctr": "containerd", "runc": "runc", "unshare": "util-linux"}


def missing() -> list[str]:
    """Name what is not installed here, each with Debian's package."""
    return [
        f"{name} (package {package})" for name, package in _PROGRAMS.items() if shutil.which(name) is None
    ]


class PrivateContainerd:
    """Starts containerd in a directory, and ends it.

    Args:
        directory: An existing directory with a short path; everything is put there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = directory / "containerd.sock"

    def __enter__(self) -> Self:
        """Start it and wait until it answers.

        Raises:
            UnavailableError: A program is missing, or it does not come up.
        """
        if lacking := missing():
            raise UnavailableError(f"cannot start a containerd: not installed: {', '.join(lacking)}")
        write_image(self._directory / "image.tar")
        config = self._directory / "config.toml"
        config.write_text(_CONFIG.format(here=self._directory, image=IMAGE))
        (self._directory / "cni").mkdir(exist_ok=True)
        with (self._directory / "containerd.log").open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - no part of it is input
                ["unshare", "--mount", "--propagation", "private", "containerd", "-c", str(config)],  # noqa: S607
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C must not end it before its pods
            )
        try:
            self._wait(20.0)
            import_image(self.socket, self._directory / "image.tar", "--snapshotter", "native")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _wait(self, seconds: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            if self.socket.exists():
                try:
                    with CriClient(str(self.socket), timeout=1.0) as client:
                        client.version()
                except TopoproxyError:
                    pass
                else:
                    return
            time.sleep(0.05)
        lines = (self._directory / "containerd.log").read_text(errors="replace").splitlines()
        raise UnavailableError(f"cannot start a containerd: {lines[-1] if lines else 'it does not answer'}")


def import_image(socket: Path, archive: Path, *options: str) -> None:
    """Put the image of the demonstration into a containerd, with options for ``ctr images import``.

    Raises:
        UnavailableError: ``ctr`` failed; its words are in the message.
    """
    _ctr(socket, "images", "import", *options, str(archive))


def remove_image(socket: Path) -> None:
    """Take the image out again; raises UnavailableError as ``import_image``."""
    _ctr(socket, "images", "rm", IMAGE)


def _ctr(socket: Path, *words: str) -> None:
    done = subprocess.run(  # noqa: S603 - no part of it is input
        ["ctr", "-a", str(socket), "-n", "k8s.io", *words],  # noqa: S607
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode:
        raise UnavailableError(
            f"cannot run ctr {words[0]} {words[1]}: {done.stderr.strip().splitlines()[-1:]}"
        )
