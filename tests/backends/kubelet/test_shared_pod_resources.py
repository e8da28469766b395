"""One answer of kubelet for many readers: how long it is used, and which readers get an error."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from proxy.api.kubelet import podresources_pb2 as pb
from proxy.backends.kubelet.settings import KubeletError
from proxy.backends.kubelet.shared_pod_resources import FRESH_S, SharedAnswer, SharedPodResources


class Source:
    def __init__(self) -> None:
        self.now = 100.0
        self.queries = 0
        self.fails = False
        self.waits: threading.Event | None = None
        self.begun = threading.Event()

    def query(self) -> int:
        self.queries += 1
        self.begun.set()
        if self.waits is not None:
            assert self.waits.wait(60)
        if self.fails:
            raise KubeletError("out of order")
        return self.queries


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def answer(source: Source) -> SharedAnswer[int]:
    return SharedAnswer(source.query, lambda: source.now)


def test_an_answer_is_shared_for_a_tenth_of_a_second(source: Source, answer: SharedAnswer[int]) -> None:
    assert [answer.get(), answer.get()] == [1, 1]
    source.now += FRESH_S - 0.01
    assert answer.get() == 1
    source.now += 0.02
    assert answer.get() == 2


def test_an_error_reaches_waiting_readers_and_no_later_reader(
    source: Source, answer: SharedAnswer[int]
) -> None:
    source.fails, source.waits = True, threading.Event()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(answer.get) for _ in range(3)]
        assert source.begun.wait(60)
        while not all(job.running() for job in waiting):
            pass
        source.waits.set()
        for job in waiting:
            with pytest.raises(KubeletError, match="out of order"):
                job.result(60)
    assert source.queries == 1
    source.fails, source.now = False, source.now + 0.001
    assert answer.get() == 2


def test_the_lists_are_kubelets_own(tmp_path: Path, serve: Any) -> None:
    listed = pb.ListPodResourcesResponse(pod_resources=[pb.PodResources(name="web")])
    given = pb.AllocatableResourcesResponse(cpu_ids=[1])
    answers = {
        "List": lambda *_: listed.SerializeToString(),
        "GetAllocatableResources": lambda *_: given.SerializeToString(),
    }
    serve(tmp_path / "kubelet.sock", "v1.PodResourcesLister", **answers)
    shared = SharedPodResources(f"unix://{tmp_path}/kubelet.sock")
    assert shared.pods() == listed
    assert shared.allocatable_resources() == given
    shared.close()
    with pytest.raises(KubeletError, match="closed"):
        SharedAnswer(lambda: shared._pods._query(), lambda: 0.0).get()
