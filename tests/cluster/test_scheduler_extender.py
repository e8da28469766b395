"""The extender under the stock kube-scheduler, on a fleet of nodes as objects."""

from __future__ import annotations

import json
import time

from tests.cluster.extender_process import DEPLOY, SCHEDULER
from tests.cluster.fake_fleet import NUMATOPOLOGIES, PODS
from tests.cluster.scheduling_cluster import SchedulingCluster
from tests.scheduler.objects import pod


def test_no_pod_of_a_burst_is_rejected_by_its_node(scheduling: SchedulingCluster) -> None:
    sizes = scheduling.pod_sizes(0.95)
    stock = scheduling.burst("stock-", sizes, "default-scheduler")
    assert scheduling.extender.get("/advice").startswith("403"), "without a certificate"
    assert scheduling.extender.get("/advice", trusted=True).startswith("{")
    ours = scheduling.burst("ours-", sizes)
    print(f"{len(sizes)} pods: stock runs {stock[0]}, rejected {stock[1]}; with the extender {ours}")
    assert ours[1] == 0
    # How many pods fit depends on the order in which they come. Each pod that waits must fit nowhere.
    assert not scheduling.fitting


def test_objects_that_are_malformed(scheduling: SchedulingCluster) -> None:
    last = len(scheduling.fleet.nodes) - 1
    try:
        for number in range(last):
            scheduling.plane.merge(
                f"{NUMATOPOLOGIES}/f{number}", {"spec": {"numares": {"cpu": {"allocatable": "x"}}}}
            )
        time.sleep(1)
        scheduling.fleet.create_pods("left", [4] * 4, SCHEDULER)
        scheduling.fleet.until_settled(4)
        assert set(scheduling.fleet.admitted.values()) == {f"f{last}"}
    finally:
        for number in range(last):
            spec = scheduling.fleet.nodes[f"f{number}"].published()["spec"]
            scheduling.plane.merge(f"{NUMATOPOLOGIES}/f{number}", {"spec": spec})
        scheduling.fleet.clear()


def test_a_waiting_pod_is_bound_when_an_object_shows_more_free_cpus(scheduling: SchedulingCluster) -> None:
    """A reserve was made smaller: no event of the cluster makes kube-scheduler try the pod again."""
    paths = {name: f"{NUMATOPOLOGIES}/{name}" for name in scheduling.fleet.nodes}
    try:
        for path in paths.values():
            scheduling.plane.merge(path, {"spec": {"numares": {"cpu": {"allocatable": "1-3"}}}})
        time.sleep(25)  # the objects show pods of the tests before as ended for this long
        scheduling.fleet.create_pods("waiting", [4], SCHEDULER)
        time.sleep(15)  # longer than a back-off of kube-scheduler
        assert not scheduling.fleet.decided_count
        scheduling.plane.merge(paths["f0"], {"spec": scheduling.fleet.nodes["f0"].published()["spec"]})
        scheduling.fleet.until_settled(1, quiet_s=30)
        assert scheduling.fleet.admitted == {"waiting0": "f0"}
    finally:
        for name, path in paths.items():
            scheduling.plane.merge(path, {"spec": scheduling.fleet.nodes[name].published()["spec"]})
        scheduling.fleet.clear()


def test_cpus_of_an_lsr_pod_are_annotated_when_it_is_bound(scheduling: SchedulingCluster) -> None:
    raw = pod("lsr", 4, labels={"koordinator.sh/qosClass": "LSR"}, schedulerName=SCHEDULER)
    del raw["metadata"]["uid"], raw["metadata"]["namespace"]
    scheduling.plane.create(PODS, raw)
    scheduling.fleet.until_settled(1)
    found = scheduling.plane.get(f"{PODS}/lsr")
    assert found is not None
    status = json.loads(found["metadata"]["annotations"]["scheduling.koordinator.sh/resource-status"])
    assert status["numaNodeResources"][0]["resources"] == {"cpu": "4"}
    scheduling.fleet.clear()


def test_the_policy_names_the_scheduler_of_pods_that_ask_for_alignment(scheduling: SchedulingCluster) -> None:
    scheduling.plane.install(DEPLOY / "scheduler-name-policy.yaml")
    scheduling.plane.merge(
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
        names[name] = scheduling.plane.create(PODS, raw)["spec"]["schedulerName"]
    assert names == {"plain": "default-scheduler", "asks": SCHEDULER}
    scheduling.fleet.until_settled(2)
    scheduling.fleet.clear()
