"""The stand-in runtime changes the tree as containerd with runc was observed to do."""

from __future__ import annotations

import json
import threading

import grpc
import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.demo.client import CallRefused, CriClient, DemoPod
from proxy.demo.runtime import StandInRuntime
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import KubeQos
from tests.testkit.waiting import LIMIT_S, wait_until


def linux(**values) -> pb.LinuxContainerResources:
    return pb.LinuxContainerResources(**values)


def created(client, name="a", **values):
    """A created container with resources of the test's choice."""
    pod = client.run_pod(DemoPod(name))
    config = pb.ContainerConfig(metadata=pb.ContainerMetadata(name="main"))
    config.linux.resources.CopyFrom(linux(**values))
    request = pb.CreateContainerRequest(pod_sandbox_id=pod.pod_id, config=config, sandbox_config=pod.config)
    pod.container_id = client.call("CreateContainer", request).container_id
    return pod


def group(cgroups, pod):
    return cgroups.find(pod.config.linux.cgroup_parent, pod.container_id)


def cpus(cgroups, pod) -> str:
    return str(cgroups.read(group(cgroups, pod)).cpus)


def mems(cgroups, pod) -> str:
    return str(cgroups.read(group(cgroups, pod)).mems)


def refused(code: grpc.StatusCode):
    return pytest.raises(RuntimeCallError, check=lambda error: error.code == code.value[0])


def test_a_container_has_no_cgroup_before_its_start(client, cgroups):
    pod = created(client, cpuset_cpus="2-3", cpuset_mems="0")
    assert group(cgroups, pod) is None
    client.start(pod.container_id)
    assert (cpus(cgroups, pod), mems(cgroups, pod)) == ("2-3", "0")
    assert group(cgroups, pod).endswith(f"/burstable/pod{pod.config.metadata.uid}/{pod.container_id}")


def test_an_update_of_a_created_container_takes_effect_at_its_start(client, cgroups):
    pod = created(client, cpuset_cpus="0")
    client.update(pod.container_id, linux(cpuset_cpus="1"))
    client.start(pod.container_id)
    assert cpus(cgroups, pod) == "1"


def test_an_update_of_anything_writes_the_saved_cpuset_again(client, cgroups):
    pod = created(client, cpuset_cpus="2-5", cpuset_mems="0")
    client.start(pod.container_id)
    cgroups.write(group(cgroups, pod), CpuSet.parse("6-7"), Mask([1]))
    client.update(pod.container_id, linux(cpu_quota=50_000))
    assert (cpus(cgroups, pod), mems(cgroups, pod)) == ("2-5", "0")


def test_an_update_is_merged_with_the_saved_resources(client, runtime):
    pod = created(client, cpuset_cpus="2-5", cpu_shares=512, cpu_quota=1000)
    client.start(pod.container_id)
    client.update(pod.container_id, linux(cpuset_cpus="1", cpu_shares=256))
    saved = runtime.containers[pod.container_id].resources
    assert saved == linux(cpuset_cpus="1", cpu_shares=256, cpu_quota=1000)


def test_without_a_cpuset_v1_copies_the_pods_and_v2_stays_empty(client, cgroups):
    pod = created(client)
    client.start(pod.container_id)
    assert (cpus(cgroups, pod), mems(cgroups, pod)) == (("0-7", "0-1") if cgroups.version == 1 else ("", ""))
    assert str(cgroups.read(group(cgroups, pod)).effective_cpus) == "0-7"


def test_a_narrow_pod_refuses_on_v1_and_falls_back_on_v2(client, cgroups):
    pod = created(client, cpuset_cpus="6")
    parent = pod.config.linux.cgroup_parent.strip("/")
    for path in (f"{parent}/{pod.pod_id}", parent):  # the pause container sits in the pod's group
        cgroups.write(path, CpuSet.parse("0-3"), None)
    if cgroups.version == 1:
        with refused(grpc.StatusCode.UNKNOWN):
            client.start(pod.container_id)
        assert group(cgroups, pod) is None
    else:
        client.start(pod.container_id)
        assert str(cgroups.read(group(cgroups, pod)).effective_cpus) == "0-3"


def test_an_impossible_cpu_fails_a_start_with_runcs_message(client, runtime, cgroups):
    pod = created(client, cpuset_cpus="99")
    with refused(grpc.StatusCode.UNKNOWN) as caught:
        client.start(pod.container_id)
    assert "runc create failed" in str(caught.value)
    assert 'failed to write "99"' in str(caught.value)
    assert "numerical result out of range" in str(caught.value)
    assert group(cgroups, pod) is None
    status = client.status(pod.container_id).status
    assert (status.state, status.exit_code, status.reason) == (pb.CONTAINER_EXITED, 128, "StartError")


def test_an_impossible_update_is_refused_and_forgotten(client, cgroups):
    pod = created(client, cpuset_cpus="1", cpuset_mems="0")
    client.start(pod.container_id)
    with refused(grpc.StatusCode.UNKNOWN) as caught:
        client.update(pod.container_id, linux(cpuset_cpus="2", cpuset_mems="7"))
    assert 'failed to update resources: failed to write "7"' in str(caught.value)
    assert (cpus(cgroups, pod), mems(cgroups, pod)) == ("1", "0")
    client.update(pod.container_id, linux(cpu_shares=7))
    assert cpus(cgroups, pod) == "1"


@pytest.mark.parametrize("end", ["stop", "crash", "remove", "stop pod", "remove pod"])
def test_every_end_removes_the_cgroup(client, runtime, cgroups, end):
    pod = created(client)
    client.start(pod.container_id)
    path = group(cgroups, pod)
    {
        "stop": lambda: client.stop(pod.container_id),
        "crash": lambda: runtime.exit(pod.container_id, 3),
        "remove": lambda: client.remove(pod.container_id),
        "stop pod": lambda: client.call(
            "StopPodSandbox", pb.StopPodSandboxRequest(pod_sandbox_id=pod.pod_id)
        ),
        "remove pod": lambda: client.end_pod(pod),
    }[end]()
    assert not (cgroups.root / path).exists()
    left = runtime.containers.get(pod.container_id)
    assert (left is None) == (end.startswith("remove"))
    if left is not None:
        assert (left.state, left.exit_code) == (pb.CONTAINER_EXITED, 3 if end == "crash" else 137)


def test_stopping_a_created_container_leaves_it_created(client, runtime):
    pod = created(client)
    client.stop(pod.container_id)
    assert runtime.containers[pod.container_id].state == pb.CONTAINER_CREATED
    client.start(pod.container_id)


def test_only_removals_accept_unknown_ids(client):
    for method, code in [
        ("StartContainer", grpc.StatusCode.NOT_FOUND),
        ("StopContainer", grpc.StatusCode.NOT_FOUND),
        ("ContainerStatus", grpc.StatusCode.NOT_FOUND),
        ("UpdateContainerResources", grpc.StatusCode.NOT_FOUND),
    ]:
        with refused(code):
            client.call(method, getattr(pb, f"{method}Request")(container_id="missing"))
    with refused(grpc.StatusCode.NOT_FOUND):
        client.call("PodSandboxStatus", pb.PodSandboxStatusRequest(pod_sandbox_id="missing"))
    with refused(grpc.StatusCode.NOT_FOUND):
        client.call("CreateContainer", pb.CreateContainerRequest(pod_sandbox_id="missing"))
    client.remove("missing")
    client.end_pod("missing")


def test_names_are_unique(client):
    pod = created(client)
    with refused(grpc.StatusCode.UNKNOWN):
        client.call("RunPodSandbox", pb.RunPodSandboxRequest(config=pod.config))
    with refused(grpc.StatusCode.UNKNOWN):
        client.create(pod)
    client.start(pod.container_id)
    with refused(grpc.StatusCode.UNKNOWN):
        client.start(pod.container_id)


def test_unknown_methods_and_both_versions(client, runtime):
    with grpc.insecure_channel(f"unix:{runtime.socket_path}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/runtime.v1.RuntimeService/Attach")(b"", timeout=LIMIT_S)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        for service in ("runtime.v1", "runtime.v1alpha2"):
            answer = channel.unary_unary(f"/{service}.RuntimeService/Version")(b"", timeout=LIMIT_S)
            assert pb.VersionResponse.FromString(answer).runtime_name == "standin"
            assert channel.unary_unary(f"/{service}.ImageService/PullImage")(b"", timeout=LIMIT_S)
    assert [c.service.split(".")[1] for c in runtime.calls if c.method == "Version"] == ["v1", "v1alpha2"]


def test_status_shows_the_spec(client):
    pod = created(client, cpuset_cpus="1", cpuset_mems="0", cpu_shares=512, memory_limit_in_bytes=1 << 20)
    answer = client.status(pod.container_id)
    spec = json.loads(answer.info["info"])["runtimeSpec"]["linux"]
    assert spec["cgroupsPath"] == f"{pod.config.linux.cgroup_parent}/{pod.container_id}"
    assert spec["resources"]["cpu"] == {"cpus": "1", "mems": "0", "shares": 512}
    assert spec["resources"]["memory"] == {"limit": 1 << 20}
    assert answer.status.resources.linux.cpuset_cpus == "1"


def test_a_slice_as_parent_yields_a_scope_below_it(client, cgroups):
    pod = created(client, name="s")
    pod = client.run_pod(DemoPod("t", kube_qos=KubeQos.BEST_EFFORT))
    pod.config.linux.cgroup_parent = "kubepods-besteffort-podx_y.slice"
    pod.config.metadata.uid = "x_y"
    request = pb.RunPodSandboxRequest(config=pod.config)
    pod.pod_id = client.call("RunPodSandbox", request).pod_sandbox_id
    client.start(client.create(pod))
    spec = json.loads(client.status(pod.container_id).info["info"])["runtimeSpec"]["linux"]
    assert spec["cgroupsPath"] == f"kubepods-besteffort-podx_y.slice:cri-containerd:{pod.container_id}"
    assert group(cgroups, pod) == (
        "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podx_y.slice/"
        f"cri-containerd-{pod.container_id}.scope"
    )


def test_lists_and_filters(client):
    one, two = created(client, "one"), created(client, "two")
    client.start(two.container_id)
    assert {pod.metadata.name for pod in client.list_pods()} == {"one", "two"}

    def listed(**values):
        request = pb.ListContainersRequest(filter=pb.ContainerFilter(**values))
        return [c.id for c in client.call("ListContainers", request).containers]

    assert listed() == [one.container_id, two.container_id]
    assert listed(id=two.container_id) == [two.container_id]
    assert listed(pod_sandbox_id=one.pod_id) == [one.container_id]
    assert listed(state=pb.ContainerStateValue(state=pb.CONTAINER_RUNNING)) == [two.container_id]
    assert listed(label_selector={"no": "such"}) == []


def test_a_create_can_be_made_to_fail_once(client, runtime):
    pod = client.run_pod(DemoPod("a"))
    runtime.fail_next_create("disk full")
    with pytest.raises(RuntimeCallError, match="disk full"):
        client.create(pod)
    assert runtime.containers == {}
    client.create(pod)
    assert [c.code for c in runtime.calls if c.method == "CreateContainer"] == [
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.OK,
    ]


def test_a_delayed_call_does_not_delay_the_others(client, runtime):
    pod = created(client)
    gate = threading.Event()
    runtime.before("StartContainer", lambda _: gate.wait(LIMIT_S) and None)
    thread = threading.Thread(target=client.start, args=(pod.container_id,))
    thread.start()
    try:
        client.version()
        assert runtime.containers[pod.container_id].state == pb.CONTAINER_CREATED
    finally:
        gate.set()
        thread.join(LIMIT_S)
    assert runtime.containers[pod.container_id].state == pb.CONTAINER_RUNNING


def test_records_outlive_a_kill(client, runtime):
    pod = created(client)
    client.start(pod.container_id)
    runtime.kill()
    assert runtime.socket_path.is_socket()
    with pytest.raises(UnavailableError), CriClient(str(runtime.socket_path), timeout=0.2) as late:
        late.version()
    runtime.start()
    with CriClient(str(runtime.socket_path), timeout=LIMIT_S) as again:
        assert again.status(pod.container_id).status.state == pb.CONTAINER_RUNNING


def test_the_events_of_a_container_come_in_order(client, runtime):
    with grpc.insecure_channel(f"unix:{runtime.socket_path}") as channel:
        stream = channel.unary_stream(
            "/runtime.v1.RuntimeService/GetContainerEvents",
            request_serializer=pb.GetEventsRequest.SerializeToString,
            response_deserializer=pb.ContainerEventResponse.FromString,
        )(pb.GetEventsRequest(), timeout=LIMIT_S)
        reported = []
        reader = threading.Thread(target=lambda: reported.extend(next(stream) for _ in range(4)))
        wait_until(lambda: runtime._service.events._queues)
        reader.start()
        pod = created(client)
        client.start(pod.container_id)
        runtime.exit(pod.container_id, 0)
        client.remove(pod.container_id)
        reader.join(LIMIT_S)
        stream.cancel()
    assert [event.container_event_type for event in reported] == [0, 1, 2, 3]
    assert reported[2].containers_statuses[0].reason == "Completed"


def test_without_events_the_stream_is_unimplemented(cgroups, tmp_path):
    with (
        StandInRuntime(tmp_path / "e.sock", cgroups, events=False, alpha=False) as runtime,
        grpc.insecure_channel(f"unix:{runtime.socket_path}") as channel,
    ):
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream("/runtime.v1.RuntimeService/GetContainerEvents")(b"", timeout=LIMIT_S))
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/runtime.v1alpha2.RuntimeService/Version")(b"", timeout=LIMIT_S)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_hook_can_refuse_with_any_status(client, runtime):
    def refuse(_):
        raise CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much")

    remove = runtime.before("Version", refuse)
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
        client.version()
    remove()
    assert client.version() == "standin 1.0"
