"""The extender under the stock kube-scheduler, on a fleet of nodes as objects."""

from __future__ import annotations

import json
import time

from tests.cluster.extender_process import DEPLOY, SCHEDULER
from tests.cluster.fake_fleet import NUMATOPOLOGIES, PODS
from tests.cluster.scheduling_bed import SchedulingBed
from tests.scheduler.objects import pod


def test_no_pod_of_a_burst_is_rejected_by_its_node(bed: SchedulingBed) -> None:
    sizes = bed.pods(0.95)
    stock = bed.burst("stock-", sizes, "default-scheduler")
    assert bed.extender.get("/advice").startswith("403"), "without a certificate"
    assert bed.extender.get("/advice", trusted=True).startswith("{")
    ours = bed.burst("ours-", sizes)
    print(f"{len(sizes)} pods: stock runs {stock[0]}, rejected {stock[1]}; with the extender {ours}")
    assert ours[1] == 0
    # How many pods fit depends on the order in which they come. Each pod that waits must fit nowhere.
    assert not bed.fitting


def test_objects_that_are_malformed(bed: SchedulingBed) -> None:
    last = len(bed.fleet.nodes) - 1
    try:
        for number in range(last):
            bed.plane.merge(
                f"{NUMATOPOLOGIES}/f{number}", {"spec": {"numares": {"cpu": {"allocatable": "x"}}}}
            )
        time.sleep(1)
        bed.fleet.create_pods("left", [4] * 4, SCHEDULER)
        bed.fleet.until_settled(4)
        assert set(bed.fleet.admitted.values()) == {f"f{last}"}
    finally:
        for number in range(last):
            spec = bed.fleet.nodes[f"f{number}"].published()["spec"]
            bed.plane.merge(f"{NUMATOPOLOGIES}/f{number}", {"spec": spec})
        bed.fleet.clear()


def test_a_waiting_pod_is_bound_when_an_object_shows_more_free_cpus(bed: SchedulingBed) -> None:
    """A reserve was made smaller: no event of the cluster makes kube-scheduler try the pod again."""
    paths = {name: f"{NUMATOPOLOGIES}/{name}" for name in bed.fleet.nodes}
    try:
        for path in paths.values():
            bed.plane.merge(path, {"spec": {"numares": {"cpu": {"allocatable": "1-3"}}}})
        time.sleep(25)  # the objects show pods of the tests before as ended for this long
        bed.fleet.create_pods("waiting", [4], SCHEDULER)
        time.sleep(15)  # longer than a back-off of kube-scheduler
        assert not bed.fleet.judged
        bed.plane.merge(paths["f0"], {"spec": bed.fleet.nodes["f0"].published()["spec"]})
        bed.fleet.until_settled(1, quiet_s=30)
        assert bed.fleet.admitted == {"waiting0": "f0"}
    finally:
        for name, path in paths.items():
            bed.plane.merge(path, {"spec": bed.fleet.nodes[name].published()["spec"]})
        bed.fleet.clear()


def test_cpus_of_an_lsr_pod_are_annotated_when_it_is_bound(bed: SchedulingBed) -> None:
    raw = pod("lsr", 4, labels={"koordinator.sh/qosClass": "LSR"}, schedulerName=SCHEDULER)
    del raw["metadata"]["uid"], raw["metadata"]["namespace"]
    bed.plane.create(PODS, raw)
    bed.fleet.until_settled(1)
    found = bed.plane.get(f"{PODS}/lsr")
    assert found is not None
    status = json.loads(found["metadata"]["annotations"]["scheduling.koordinator.sh/resource-status"])
    assert status["numaNodeResources"][0]["resources"] == {"cpu": "4"}
    bed.fleet.clear()


def test_the_policy_names_the_scheduler_of_pods_that_ask_for_alignment(bed: SchedulingBed) -> None:
    bed.plane.install(DEPLOY / "scheduler-name-policy.yaml")
    bed.plane.merge(
        "/api/v1/namespaces/fleet", {"metadata": {"labels": {"topoproxy.io/scheduler": "aligned"}}}
    )
    time.sleep(1)  # until the admission plugin has seen the label and the policy
    names = {}
    for name, fields in (
        ("plain", {}),
        ("asks", {"volcano.sh/numa-topology-policy": "single-numa-node"}),
    ):
        raw = pod(name, 2, annotations=fields)
        del raw["metadata"]["uid"], raw["metadata"]["namespace"]
        names[name] = bed.plane.create(PODS, raw)["spec"]["schedulerName"]
    assert names == {"plain": "default-scheduler", "asks": SCHEDULER}
    bed.fleet.until_settled(2)
    bed.fleet.clear()
