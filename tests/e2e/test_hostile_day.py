"""Pods of a hostile tenant on a real containerd, with a crash: pods of other tenants are not affected.

``make hostile-day`` runs it with 200 hostile and 50 honest pods.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from crio import DIRECTORY as CRIO

if TYPE_CHECKING:
    from private_runtime import PrivateRuntime

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        bool(CRIO), reason="CRI-O makes cgroups at the create, and the CPUs of this day do not exist"
    ),
]
BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short path, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="th"))
    yield made
    shutil.rmtree(made)


@pytest.mark.timeout(180)
def test_forty_hostile_pods_do_not_affect_twelve_honest_ones(
    runtime: PrivateRuntime, directory: Path
) -> None:
    from hostile_day import CPUS, failures, honest_pods, play_day
    from hostile_pods import attacks

    honest = honest_pods(12)
    quiet = play_day(runtime, directory / "quiet", honest, ())
    assert quiet.owners == {"tenant-good"}, quiet.honest
    busy = play_day(runtime, directory / "busy", honest, attacks(40, 1, CPUS))
    assert failures(quiet, busy) == []
