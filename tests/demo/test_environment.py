"""The real environment: containerd and this machine's cgroups. The tests must leave no files or groups."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from proxy.demo.client import CriClient, DemoPod
from proxy.demo.demonstration import DemoOptions, run_demonstration
from proxy.demo.environment import CGROUP
from proxy.demo.private_containerd import IMAGE, PrivateContainerd, missing_programs, write_image
from proxy.demo.terminal import Screen
from proxy.model.errors import TopoproxyError, UnavailableError

GROUPS = Path("/sys/fs/cgroup")


def why_not() -> str:
    if os.geteuid() != 0:
        return "needs root"
    if lacking := missing_programs():
        return f"not installed: {', '.join(lacking)}"
    if len(os.sched_getaffinity(0)) < 2:
        return "needs two CPUs"
    try:
        with tempfile.TemporaryDirectory() as directory:
            write_image(Path(directory) / "image.tar")
    except TopoproxyError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


@pytest.fixture
def directory():
    path = Path(tempfile.mkdtemp(prefix="tp-"))  # a short path, because it holds sockets
    yield path
    shutil.rmtree(path, ignore_errors=True)


def perform(socket: Path) -> str:
    out = io.StringIO()
    assert run_demonstration(Screen(out, width=80), DemoOptions("containerd", socket)), out.getvalue()
    assert not list(GROUPS.glob(f"{CGROUP}*")) + list(GROUPS.glob(f"*/{CGROUP}"))
    return out.getvalue()


def test_on_a_private_containerd(directory):
    text = perform(directory / "none.sock")
    assert "a private containerd" in text
    assert 'failed to resolve image "localhost/absent:1": not found' in " ".join(text.split())


def test_a_running_containerd_is_used(directory):
    with PrivateContainerd(directory) as bed, CriClient(str(bed.socket), root=CGROUP, image=IMAGE) as client:
        pod = client.launch(DemoPod("guest"))
        with pytest.raises(UnavailableError, match=r"pods run there \(1\) and would be moved"):
            run_demonstration(Screen(io.StringIO(), width=80), DemoOptions("containerd", bed.socket))
        assert client.status(pod.container_id).status.state == 1
        client.end_pod(pod)
        assert f"the containerd at {bed.socket}" in " ".join(perform(bed.socket).split())
        assert client.list_pods() == []
