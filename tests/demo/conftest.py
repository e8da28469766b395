from __future__ import annotations

import pytest

from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.demo.client import CriClient
from proxy.demo.runtime import StandInRuntime
from proxy.model.idset import CpuSet, Mask
from tests.testkit.waiting import LIMIT_S


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def cgroups(request, tmp_path):
    return FakeCgroups(tmp_path / "cg", CpuSet(range(8)), Mask([0, 1]), request.param)


@pytest.fixture
def runtime(cgroups, tmp_path):
    with StandInRuntime(tmp_path / "r.sock", cgroups) as standin:
        yield standin


@pytest.fixture
def client(runtime):
    with CriClient(str(runtime.socket_path), timeout=LIMIT_S) as one:
        yield one
