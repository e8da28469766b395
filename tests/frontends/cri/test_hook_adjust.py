"""Requests adjusted by hooks, compared with a slow and simple reference implementation."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import TypeVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.api.cri import api_pb2 as pb
from proxy.frontends.cri.config_fields import PROPAGATIONS
from proxy.frontends.cri.hook_adjust import adjusted_create, adjusted_run_pod, adjusted_update
from proxy.frontends.cri.messages import cgroup_parent_suffix, create_suffix
from proxy.hooks.answers import CLEAR, LEAVE, NOTHING, Adjustment
from proxy.hooks.facts import Device, Mount
from proxy.model.errors import HookError
from proxy.model.idset import CpuSet, Mask
from proxy.wire.protobuf import encode_field
from tests.testkit.hook_facts import container_facts

_M = TypeVar("_M", pb.CreateContainerRequest, pb.RunPodSandboxRequest, pb.UpdateContainerResourcesRequest)

UNKNOWN = encode_field(13, b"from a later time") + b"\x98\x06\x07"  # a text, and field 99 with the number 7
NUMBERS = {
    "cpu_period": "cpu_period",
    "cpu_quota": "cpu_quota",
    "cpu_shares": "cpu_shares",
    "memory_limit": "memory_limit_in_bytes",
    "memory_swap_limit": "memory_swap_limit_in_bytes",
    "oom_score_adj": "oom_score_adj",
}

# -- the reference implementation ---------------------------------------------------------------------------


def expected_map(entries: Mapping[str, str], changes_by_key: Mapping[str, object]) -> dict[str, str]:
    after = {**entries, **changes_by_key}
    return {key: value for key, value in after.items() if value is not CLEAR}  # type: ignore[misc]


def expected_resources(resources: pb.LinuxContainerResources, adjustment: Adjustment) -> None:
    for name, spelled in NUMBERS.items():
        value = getattr(adjustment, name)
        if value is not LEAVE:
            setattr(resources, spelled, 0 if value is CLEAR else value)
    if adjustment.cpus is CLEAR:
        resources.cpuset_cpus = ""
    if adjustment.mems is CLEAR:
        resources.cpuset_mems = ""
    replace_map(resources.unified, adjustment.unified)


def replace_map(entries: object, changes_by_key: Mapping[str, object]) -> None:
    after = expected_map(dict(entries), changes_by_key)  # type: ignore[call-overload]
    entries.clear()  # type: ignore[attr-defined]
    entries.update(after)  # type: ignore[attr-defined]


def clean(path: str) -> str:
    return posixpath.normpath("/" + path).replace("//", "/")


def expected_list(old: list[tuple[str, bytes]], changes_by_key: Mapping[str, bytes | None]) -> list[bytes]:
    """Return the messages of the changed list; None removes a name."""
    after = []
    for index, (name, raw) in enumerate(old):
        if name not in changes_by_key:
            after.append(raw)
        elif changes_by_key[name] is not None and name not in [earlier for earlier, _ in old[:index]]:
            after.append(changes_by_key[name])
    names = [name for name, _ in old]
    return after + [raw for name, raw in changes_by_key.items() if raw is not None and name not in names]


def expected_create(body: bytes, adjustment: Adjustment) -> bytes:
    request = pb.CreateContainerRequest.FromString(body)
    config = request.config
    expected_resources(config.linux.resources, adjustment)
    replace_map(config.labels, adjustment.labels)
    replace_map(config.annotations, adjustment.annotations)

    old = {pair.key: pair for pair in reversed(config.envs)}
    values: dict[str, bytes | None] = {}
    for name, value in adjustment.envs.items():
        pair = old.get(name, pb.KeyValue(key=name))
        pair.value = b"" if value is CLEAR else value.encode("utf-8", "surrogateescape")
        values[name] = None if value is CLEAR else pair.SerializeToString()
    pairs = [(pair.key, pair.SerializeToString()) for pair in config.envs]
    envs = [pb.KeyValue.FromString(raw) for raw in expected_list(pairs, values)]
    config.ClearField("envs")
    config.envs.extend(envs)

    there = [(clean(mount.container_path), mount.SerializeToString()) for mount in config.mounts]
    sources = {clean(mount.container_path): mount for mount in reversed(config.mounts)}
    made = {
        clean(path): mount_bytes(path, mount, sources.get(clean(path)))
        for path, mount in adjustment.mounts.items()
    }
    mounts = [pb.Mount.FromString(raw) for raw in expected_list(there, made)]
    config.ClearField("mounts")
    config.mounts.extend(mounts)

    made = {clean(path): device_bytes(path, device) for path, device in adjustment.devices.items()}
    there = [(clean(device.container_path), device.SerializeToString()) for device in config.devices]
    devices = [pb.Device.FromString(raw) for raw in expected_list(there, made)]
    config.ClearField("devices")
    config.devices.extend(devices)
    return request.SerializeToString()


def mount_bytes(path: str, mount: Mount | object, there: pb.Mount | None) -> bytes | None:
    if not isinstance(mount, Mount):
        return None
    same_source = there is not None and there.host_path == mount.host_path
    message = pb.Mount.FromString(there.SerializeToString() if there is not None and same_source else b"")
    message.container_path, message.host_path, message.readonly = clean(path), mount.host_path, mount.readonly
    number = message.propagation = PROPAGATIONS.index(mount.propagation)
    unset = b"\x40\x00" if same_source and (number or not mount.readonly) else b""
    return message.SerializeToString() + unset


def device_bytes(path: str, device: Device | object) -> bytes | None:
    if not isinstance(device, Device):
        return None
    message = pb.Device(
        container_path=clean(path), host_path=device.host_path, permissions=device.permissions
    )
    return message.SerializeToString()


def expected_run_pod(body: bytes, adjustment: Adjustment) -> bytes:
    request = pb.RunPodSandboxRequest.FromString(body)
    replace_map(request.config.labels, adjustment.labels)
    replace_map(request.config.annotations, adjustment.annotations)
    if adjustment.cgroup_parent is not LEAVE:
        request.config.linux.cgroup_parent = (
            "" if adjustment.cgroup_parent is CLEAR else adjustment.cgroup_parent
        )
    return request.SerializeToString()


def expected_update(body: bytes, adjustment: Adjustment) -> bytes:
    request = pb.UpdateContainerResourcesRequest.FromString(body)
    expected_resources(request.linux, adjustment)
    replace_map(request.annotations, adjustment.annotations)
    return request.SerializeToString()


def same(kind: type[_M], one: bytes, other: bytes) -> bool:
    """Compare two requests with their unknown fields; an empty message equals a missing one."""
    plain = [kind.FromString(body) for body in (one, other)]
    for message in plain:
        if isinstance(message, pb.CreateContainerRequest):
            message.config.linux.resources.SetInParent()
        elif isinstance(message, pb.RunPodSandboxRequest):
            message.config.linux.SetInParent()
        else:
            message.linux.SetInParent()
    return plain[0].SerializeToString(deterministic=True) == plain[1].SerializeToString(deterministic=True)


# -- requests and adjustments -------------------------------------------------------------------------------

keys = st.sampled_from(["A", "B", "AB", "PATH", "a.b/c", "ü", "memory.high"])
texts = st.sampled_from(["", "A", "PATH", "1", "ü", "/data"])
values = st.one_of(st.binary(max_size=4), st.sampled_from([b"A", b"/data", b"\xff\xfe"]))
paths = st.sampled_from(
    ["/data", "/data/", "//data", "/x/../data", "/data/y/..", "/data/x", "/data/./x", "/dev/a", "/", "/y/.."]
)
maps = st.dictionaries(keys, texts, max_size=4)
changes = st.dictionaries(keys, st.one_of(texts, st.just(CLEAR)), max_size=3)
unknown = st.sampled_from([b"", UNKNOWN])
numbers = st.one_of(st.just(LEAVE), st.just(CLEAR), st.integers(-(2**63), 2**63 - 1))
erased = st.sampled_from([LEAVE, CLEAR])


@st.composite
def resources(draw: st.DrawFn) -> bytes:
    message = pb.LinuxContainerResources(
        cpu_quota=draw(st.sampled_from([0, -1, 5])),
        oom_score_adj=draw(st.sampled_from([0, -997])),
        memory_swap_limit_in_bytes=draw(st.sampled_from([0, 1 << 40])),
        cpuset_cpus=draw(st.sampled_from(["", "0-3"])),
        cpuset_mems=draw(st.sampled_from(["", "0"])),
        unified=draw(maps),
    )
    return message.SerializeToString() + draw(unknown)


@st.composite
def configs(draw: st.DrawFn) -> bytes:
    config = pb.ContainerConfig(labels=draw(maps), annotations=draw(maps), log_path="x.log")
    raw = config.SerializeToString()
    for name, value in draw(st.lists(st.tuples(keys, values), max_size=5)):
        raw += encode_field(6, pb.KeyValue(key=name, value=value).SerializeToString() + draw(unknown))
    for path in draw(st.lists(paths, max_size=3)):
        raw += encode_field(
            7, pb.Mount(container_path=path, host_path="/h").SerializeToString() + draw(unknown)
        )
    for path in draw(st.lists(paths, max_size=3)):
        raw += encode_field(8, pb.Device(container_path=path, host_path="/dev/h").SerializeToString())
    if draw(st.booleans()):
        raw += encode_field(15, encode_field(1, draw(resources())) + draw(unknown))
    return raw + draw(unknown)


@st.composite
def creates(draw: st.DrawFn) -> bytes:
    sandbox = pb.PodSandboxConfig(labels=draw(maps)).SerializeToString() + draw(unknown)
    raw = encode_field(1, b"sandbox") + encode_field(2, draw(configs())) + encode_field(3, sandbox)
    again = encode_field(2, draw(configs())) if draw(st.booleans()) else b""
    return raw + draw(unknown) + again


mounts = st.builds(
    Mount,
    st.just("/data"),
    st.sampled_from(["/h", "/new"]),
    st.booleans(),
    st.sampled_from(["private", "host_to_container", "bidirectional"]),
)
devices = st.builds(Device, st.just("/dev/a"), st.sampled_from(["/dev/h", "/dev/new"]), st.just("rwm"))
new_paths = st.sampled_from(["/data", "/dev/a", "/data/x", "/new", "/", "/data/"])
adjustments = st.builds(
    Adjustment,
    cpus=st.sampled_from([LEAVE, CLEAR, CpuSet((1,))]),
    mems=st.sampled_from([LEAVE, CLEAR, Mask((1,))]),
    **dict.fromkeys(NUMBERS, numbers),
    unified=changes,
    annotations=changes,
    labels=changes,
    envs=st.dictionaries(keys, st.one_of(st.just(CLEAR), texts, st.just("\udcff")), max_size=3),
    devices=st.dictionaries(new_paths, st.one_of(st.just(CLEAR), devices), max_size=2),
    mounts=st.dictionaries(new_paths, st.one_of(st.just(CLEAR), mounts), max_size=2),
)


@given(creates(), adjustments)
def test_an_adjusted_create_equals_the_expected_one(body: bytes, adjustment: Adjustment) -> None:
    assert same(
        pb.CreateContainerRequest, adjusted_create(body, adjustment), expected_create(body, adjustment)
    )


pods = st.builds(
    lambda labels, notes, linux, more, rest: (
        encode_field(
            1,
            pb.PodSandboxConfig(labels=labels, annotations=notes).SerializeToString()
            + encode_field(8, linux)
            + more,
        )
        + encode_field(2, b"kata")
        + rest
    ),
    maps,
    maps,
    st.sampled_from([b"", UNKNOWN, encode_field(1, b"/kubepods/podu1") + UNKNOWN]),
    unknown,
    unknown,
)


@given(pods, changes, changes, st.one_of(erased, st.just("/other")))
def test_an_adjusted_sandbox_equals_the_expected_one(
    body: bytes, labels: dict[str, str], notes: dict[str, str], parent: str
) -> None:
    adjustment = Adjustment(labels=labels, annotations=notes, cgroup_parent=parent)
    assert same(
        pb.RunPodSandboxRequest, adjusted_run_pod(body, adjustment), expected_run_pod(body, adjustment)
    )


@given(resources(), maps, unknown, adjustments)
def test_an_adjusted_update_equals_the_expected_one(
    linux: bytes, notes: dict[str, str], more: bytes, adjustment: Adjustment
) -> None:
    message = pb.UpdateContainerResourcesRequest(container_id="c1", annotations=notes)
    body = message.SerializeToString() + encode_field(2, linux) + more
    assert same(
        pb.UpdateContainerResourcesRequest,
        adjusted_update(body, adjustment),
        expected_update(body, adjustment),
    )


# -- examples -----------------------------------------------------------------------------------------------


def request() -> bytes:
    message = pb.CreateContainerRequest(pod_sandbox_id="s1")
    for name, value in (("PATH", b"/bin"), ("RAW", b"\xff\x00"), ("PATH", b"/sbin"), ("LAST", b"1")):
        message.config.envs.add(key=name, value=value)
    message.config.mounts.add(container_path="/data/", host_path="/srv", readonly=True)
    message.config.linux.resources.oom_score_adj = -997
    message.config.linux.resources.memory_limit_in_bytes = 4096
    return message.SerializeToString() + encode_field(2, UNKNOWN)


def read(body: bytes) -> pb.ContainerConfig:
    return pb.CreateContainerRequest.FromString(body).config


@pytest.mark.parametrize("change", [adjusted_create, adjusted_run_pod, adjusted_update])
def test_an_empty_adjustment_changes_nothing(change: object) -> None:
    body = request()
    assert change(body, NOTHING) is body  # type: ignore[operator]
    assert change(body, Adjustment(labels={"none": CLEAR})) is body  # type: ignore[operator]


def test_a_change_by_appending_keeps_every_byte() -> None:
    adjustment = Adjustment(
        envs={"NEW": "1", "GONE": CLEAR},
        mounts={"/new": Mount("/new", "/h")},
        devices={"/dev/new": Device("/dev/new", "/dev/h")},
        labels={"PATH": "x"},
        annotations={"PATH": "x"},
        unified={"cpu.max": "max"},
        cpu_quota=-1,
        memory_limit=CLEAR,
    )
    body = adjusted_create(request(), adjustment)
    assert body.startswith(request())
    resources = read(body).linux.resources
    assert (resources.cpu_quota, resources.memory_limit_in_bytes, dict(resources.unified)) == (
        -1,
        0,
        {"cpu.max": "max"},
    )
    assert [pair.key for pair in read(body).envs] == ["PATH", "RAW", "PATH", "LAST", "NEW"]


def test_a_changed_variable_keeps_its_place_and_other_variables_their_bytes() -> None:
    """Koordinator's proxy loses both in every create."""
    body = adjusted_create(request(), Adjustment(envs={"NEW": "\udcfe", "PATH": "/usr/bin"}))
    pairs = [(pair.key, pair.value) for pair in read(body).envs]
    assert pairs == [("PATH", b"/usr/bin"), ("RAW", b"\xff\x00"), ("LAST", b"1"), ("NEW", b"\xfe")]
    pairs = [
        (pair.key, pair.value) for pair in read(adjusted_create(request(), Adjustment(cpu_shares=2))).envs
    ]
    assert pairs == [("PATH", b"/bin"), ("RAW", b"\xff\x00"), ("PATH", b"/sbin"), ("LAST", b"1")]


def test_an_oom_score_without_an_adjustment_is_kept() -> None:
    """Koordinator's proxy writes 0 for a hook that has not set it."""
    body = adjusted_create(request(), Adjustment(cpu_shares=2, envs={"PATH": CLEAR}))
    assert read(body).linux.resources.oom_score_adj == -997
    body = adjusted_create(request(), Adjustment(oom_score_adj=0))
    assert read(body).linux.resources.oom_score_adj == 0


@pytest.mark.parametrize("adjustment", [Adjustment(envs={"NEW": "1"}), Adjustment(envs={"PATH": "1"})])
def test_unknown_fields_are_kept(adjustment: Adjustment) -> None:
    """Later versions of the CRI add fields."""
    body = request() + UNKNOWN
    after = adjusted_create(body, adjustment)
    assert read(after).SerializeToString().count(UNKNOWN) == 1
    assert after.count(UNKNOWN) == 2


def test_paths_of_mounts_are_normalized_before_the_comparison() -> None:
    body = adjusted_create(request(), Adjustment(mounts={"/data": Mount("/data", "/new")}))
    assert [(m.container_path, m.host_path, m.readonly) for m in read(body).mounts] == [
        ("/data", "/new", False)
    ]
    assert not read(adjusted_create(request(), Adjustment(mounts={"/./data": CLEAR}))).mounts


RELABEL, MAPPING = b"\x20\x01", encode_field(6, b"\x10\x05")
RECURSIVE, NOT_RECURSIVE = b"\x40\x01", b"\x40\x00"


@pytest.mark.parametrize(
    ("host_path", "readonly", "propagation", "rest"),
    [
        ("/srv", True, "private", RELABEL + MAPPING + RECURSIVE),
        ("/srv", False, "private", RELABEL + MAPPING + RECURSIVE + NOT_RECURSIVE),
        ("/srv", True, "bidirectional", RELABEL + MAPPING + RECURSIVE + NOT_RECURSIVE),
        ("/other", True, "private", b""),
    ],
)
def test_a_mount_of_the_same_source_keeps_what_hooks_do_not_know(
    host_path: str, readonly: bool, propagation: str, rest: bytes
) -> None:
    known = pb.Mount(container_path="/data", host_path="/srv", readonly=True).SerializeToString()
    body = encode_field(2, encode_field(7, known + RELABEL + MAPPING + RECURSIVE))
    mount = Mount("/data", host_path, readonly, propagation)
    (after,) = read(adjusted_create(body, Adjustment(mounts={"/data": mount}))).mounts
    assert (after.host_path, after.readonly) == (host_path, readonly)
    assert after.propagation == PROPAGATIONS.index(propagation)
    after.ClearField("container_path")
    after.ClearField("host_path")
    after.ClearField("readonly")
    after.ClearField("propagation")
    assert after.SerializeToString() == rest


def test_the_placement_of_the_engine_overrides_hooks() -> None:
    adjustment = Adjustment(cpus=CLEAR, mems=CLEAR, cpu_quota=5)
    named = request() + create_suffix(CpuSet((7,)), Mask((1,)))
    body = adjusted_create(named, adjustment)
    assert (read(body).linux.resources.cpuset_cpus, read(body).linux.resources.cpuset_mems) == ("", "")
    body = adjusted_create(named, Adjustment(cpus=CpuSet((3,)), mems=Mask((0,))))
    assert body == named, "the CPUs are appended later"
    body = adjusted_create(named, adjustment) + create_suffix(CpuSet((1,)), Mask((0,)), -1)
    resources = read(body).linux.resources
    assert (resources.cpuset_cpus, resources.cpuset_mems, resources.cpu_quota) == ("1", "0", -1)


def test_the_cgroup_of_a_pod_can_be_changed() -> None:
    message = pb.CreateContainerRequest.FromString(request())
    message.sandbox_config.linux.cgroup_parent = "/kubepods/podu1"
    message.sandbox_config.labels["app"] = "web"
    body = message.SerializeToString() + encode_field(3, UNKNOWN) + cgroup_parent_suffix("/other/podu1")
    sandbox = pb.CreateContainerRequest.FromString(body).sandbox_config
    assert (sandbox.linux.cgroup_parent, dict(sandbox.labels)) == ("/other/podu1", {"app": "web"})
    assert sandbox.SerializeToString().endswith(UNKNOWN)


@pytest.mark.parametrize(
    "adjustment",
    [
        Adjustment(labels={"a": "\ud800"}),
        Adjustment(envs={"A": "\ud800"}),
        Adjustment(mounts={"/new": Mount("/new", "/h", propagation="both")}),
        Adjustment(mounts={"/data": Mount("/data", "/h", propagation="both")}),
    ],
)
def test_an_adjustment_that_cannot_be_encoded_is_an_error(adjustment: Adjustment) -> None:
    with pytest.raises(HookError, match="cannot change a CreateContainer request to what hooks want: "):
        adjusted_create(request(), adjustment)


def test_an_invalid_request_is_an_error_if_it_must_be_decoded() -> None:
    with pytest.raises(HookError, match="cannot change a CreateContainer request"):
        adjusted_create(b"\xffPATH", Adjustment(envs={"PATH": "1"}))


@given(creates(), st.dictionaries(keys, texts, min_size=1, max_size=3))
@example(request(), {"PATH": "1"})
def test_later_facts_contain_what_hooks_set(body: bytes, envs: dict[str, str]) -> None:
    reported = container_facts(adjusted_create(body, Adjustment(envs=envs))).envs
    assert {name: reported[name] for name in envs} == envs
    others = {name: value for name, value in container_facts(body).envs.items() if name not in envs}
    assert {name: value for name, value in reported.items() if name not in envs} == others


ODD = b"\xff\xfe"


def odd_request() -> bytes:
    """A request with bytes that are not UTF-8 in fields that hooks do not change."""
    config = b"".join(
        [
            encode_field(4, ODD),
            encode_field(6, encode_field(1, b"KEEP" + ODD) + encode_field(2, ODD)),
            encode_field(6, encode_field(1, b"GONE") + encode_field(2, ODD)),
            encode_field(7, encode_field(1, b"/keep/" + ODD) + encode_field(2, ODD)),
            encode_field(7, encode_field(1, b"/gone") + encode_field(2, ODD)),
            encode_field(10, encode_field(1, b"keep") + encode_field(2, ODD)),
            encode_field(10, encode_field(1, ODD) + encode_field(2, b"keep")),
            encode_field(10, encode_field(1, b"gone") + encode_field(2, ODD)),
            encode_field(
                15, encode_field(1, encode_field(9, encode_field(1, b"keep") + encode_field(2, ODD)))
            ),
            encode_field(
                15, encode_field(1, encode_field(9, encode_field(1, b"gone") + encode_field(2, ODD)))
            ),
        ]
    )
    return (
        encode_field(1, ODD)
        + encode_field(2, config)
        + encode_field(3, encode_field(7, encode_field(1, b"pod") + encode_field(2, ODD)))
    )


def test_unchanged_fields_keep_bytes_that_are_not_utf8() -> None:
    adjustment = Adjustment(
        envs={"GONE": CLEAR, "NEW": "1"},
        mounts={"/gone": CLEAR},
        annotations={"gone": CLEAR, "new": "2"},
        unified={"gone": CLEAR},
    )
    changed = pb.CreateContainerEntries.FromString(adjusted_create(odd_request(), adjustment))
    before = pb.CreateContainerEntries.FromString(odd_request()).config
    config = changed.config
    new = encode_field(1, b"NEW") + encode_field(2, b"1")
    assert list(config.envs) == [before.envs[0], new]
    assert list(config.mounts) == [before.mounts[0]]
    assert list(config.annotations) == [
        *before.annotations[:2],
        encode_field(1, b"new") + encode_field(2, b"2"),
    ]
    assert list(config.linux.resources.unified) == [before.linux.resources.unified[0]]
    whole = changed.SerializeToString()
    for kept in (
        encode_field(1, ODD),
        encode_field(4, ODD),
        encode_field(3, encode_field(7, encode_field(1, b"pod") + encode_field(2, ODD))),
    ):
        assert kept in whole
    assert b"gone" not in whole
    assert b"GONE" not in whole


def test_a_sandbox_and_an_update_keep_bytes_that_are_not_utf8() -> None:
    keep, gone = (
        encode_field(1, b"keep") + encode_field(2, ODD),
        encode_field(1, b"gone") + encode_field(2, ODD),
    )
    adjustment = Adjustment(annotations={"gone": CLEAR})
    run = adjusted_run_pod(
        encode_field(1, encode_field(2, ODD) + encode_field(7, gone) + encode_field(7, keep)), adjustment
    )
    assert pb.RunPodSandboxEntries.FromString(run).config.annotations[:] == [keep]
    assert encode_field(2, ODD) in run
    update = adjusted_update(encode_field(1, ODD) + encode_field(4, gone) + encode_field(4, keep), adjustment)
    assert pb.UpdateContainerResourcesEntries.FromString(update).annotations[:] == [keep]
    assert encode_field(1, ODD) in update
