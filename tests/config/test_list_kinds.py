"""Keys whose values are lists, or keys with values."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config import Config, parse
from proxy.config.frozen_mapping import FrozenMapping
from proxy.config.schema import keys
from proxy.model.errors import ConfigError
from proxy.model.options import CpuOptions, Scope, TopologyOptions, TopologyPolicy

GI = 1 << 30


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml")
    return str(caught.value).removeprefix("cannot use the configuration f.yaml: ")


def test_a_kubelet_configuration_is_read() -> None:
    config = parse(
        """\
cpuManagerPolicy: static
cpuManagerPolicyOptions:
  full-pcpus-only: "true"
  strict-cpu-reservation: true
  align-by-socket: 0
kubeReserved: {cpu: 500m, memory: 1Gi, ephemeral-storage: 10Gi, pid: "1000"}
systemReserved: {cpu: 0.7, memory: 1Gi}
topologyManagerPolicy: restricted
topologyManagerScope: pod
topologyManagerPolicyOptions: {prefer-closest-numa-nodes: "true", max-allowable-numa-nodes: "010"}
memoryManagerPolicy: Static
evictionHard: {memory.available: 512Mi, nodefs.available: 10%}
reservedMemory:
- numaNode: 1
  limits: {memory: 1.5Gi}
- numaNode: 0
  limits: {memory: 1Gi}
- {numaNode: 0, limits: {hugepages-1Gi: 2Gi}}
""",
        "f",
    )
    assert config.cpu_manager_policy_options == CpuOptions(full_pcpus_only=True, strict_cpu_reservation=True)
    assert (config.topology_manager_policy, config.topology_manager_scope) == (
        TopologyPolicy.RESTRICTED,
        Scope.POD,
    )
    assert config.topology_manager_policy_options == TopologyOptions(True, 10)
    assert (config.kube_reserved.cpu, config.kube_reserved.memory) == (500, GI)
    assert (config.kube_reserved.ephemeral_storage, config.kube_reserved.pid) == (10 * GI, 1000)
    assert config.memory_manager_policy == "Static"
    assert config.reserved_memory == {0: {"memory": GI, "hugepages-1Gi": 2 * GI}, 1: {"memory": 3 << 29}}
    assert list(config.reserved_memory) == [0, 1]
    assert config.eviction_memory == 512 << 20
    assert config.reserved_cpu_amount == 2


def test_all_options_are_off_by_default() -> None:
    config = Config()
    assert (config.topology_manager_policy, config.topology_manager_scope) == ("none", "container")
    assert (config.memory_manager_policy, dict(config.reserved_memory)) == ("None", {})
    assert config.eviction_memory is None
    assert (config.reserved_cpu_amount, config.explain_history) == (None, 500)
    kubelet = config.kubelet
    assert (kubelet.pods, kubelet.pods_api, kubelet.pod_resources, kubelet.timeout) == ("", None, None, 0.5)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("kubeReserved: {cpu: 1}", 1),
        ("kubeReserved: {cpu: 1.001}", 2),
        ("kubeReserved: {cpu: 500m}\nsystemReserved: {cpu: 500m}", 1),
        ("systemReserved: {cpu: 0}", 0),
        ("systemReserved: {memory: 1Gi}", None),
        ("kubeReserved: {cpu: 3}\nreservedSystemCPUs: 0-1", None),
    ],
)
def test_the_amount_of_reserved_cpus(text: str, amount: int | None) -> None:
    assert parse(text, "f").reserved_cpu_amount == amount


CPU, TOPOLOGY = "cpuManagerPolicyOptions", "topologyManagerPolicyOptions"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"{CPU}:\n  full-pcpu-only: 1",
            f"line 2: {CPU}.full-pcpu-only: unknown option; did you mean full-pcpus",
        ),
        (
            f"{CPU}: {{x: 1}}",
            f"line 1: {CPU}.x: unknown option (known: full-pcpus-only, strict-cpu-reservation, ",
        ),
        (
            f"{CPU}:\n  align-by-socket: yes",
            f"line 2: {CPU}.align-by-socket: is 'yes', which is not a b",
        ),
        (f"{CPU}:\n  align-by-socket:", f"line 2: {CPU}.align-by-socket: has no value"),
        (
            f"{CPU}: {{align-by-socket: []}}",
            f"line 1: {CPU}.align-by-socket: must be a text, a number, or true or f",
        ),
        (f"{CPU}: [align-by-socket]", f"line 1: {CPU}: must be options with values: full-pcpus-only, "),
        (f"{CPU}: full-pcpus-only", f"line 1: {CPU}: must be options with values: full-pcpus-only, "),
        (f"{CPU}:", f"line 1: {CPU}: has no value (leave the key out for the default)"),
        (
            f"{CPU}:\n  align-by-socket: true\n  align-by-socket: true",
            f"line 3: {CPU}.align-by-socket: given twice",
        ),
        (f"{CPU}: {{? [a] : b}}", f"line 1: {CPU}.?: a key must be a word"),
        (
            f"mode: enforce\n{CPU}: {{full-pcpus-only: true, distribute-cpus-across-cores: true}}",
            f"line 2: {CPU}: full-pcpus-only and distribute-cpus-across-cores exclude each other",
        ),
        (
            f"{TOPOLOGY}:\n  max-allowable-numa-nodes: 7",
            f"line 2: {TOPOLOGY}.max-allowable-numa-nodes: is 7, it must be 8 or more",
        ),
        (
            "topologyManagerPolicy: strict",
            "line 1: topologyManagerPolicy: 'strict' is not none, best-effort, restr",
        ),
        (
            "topologyManagerPolicy: Restricted",
            "line 1: topologyManagerPolicy: 'Restricted' is not none, best-eff",
        ),
        (
            "memoryManagerPolicy: static",
            "line 1: memoryManagerPolicy: 'static' is not None or Static; did you mean S",
        ),
        (
            "memoryManagerPolicy: none",
            "line 1: memoryManagerPolicy: 'none' is not None or Static; did you mean None?",
        ),
        ("kubeReserved: {cpus: 1}", "line 1: kubeReserved.cpus: unknown key; did you mean kubeReserved.cpu?"),
        (
            "ephemeral-storage: 1Gi",
            "line 1: ephemeral-storage: unknown key; did you mean kubeReserved.ephemeral-st",
        ),
        ("kubeReserved: {cpu: -1}", "line 1: kubeReserved.cpu: -1 is negative"),
        (
            "kubeReserved: {memory: 1GB}",
            "line 1: kubeReserved.memory: '1GB' is not an amount: 'GB' is not a suffix",
        ),
        (
            "kubeReserved: {memory: true}",
            "line 1: kubeReserved.memory: must be an amount such as 1Gi, or empty, not t",
        ),
        (
            "reservedMemory: {numaNode: 0}",
            "line 1: reservedMemory: must be a list of NUMA nodes with limits, not keys",
        ),
        ("reservedMemory: [5]", "line 1: reservedMemory[0]: must be numaNode and limits, not a number ('5')"),
        ("reservedMemory:\n- numaNode: 0", "line 2: reservedMemory[0]: limits is missing"),
        ("reservedMemory:\n- {numaNode: 0, limits: {}}", "line 2: reservedMemory[0]: limits is missing"),
        ("reservedMemory:\n- limits: {memory: 1}", "line 2: reservedMemory[0]: numaNode is missing"),
        (
            "reservedMemory: [{numanode: 0}]",
            "line 1: reservedMemory[0].numanode: unknown key; did you mean numaNode?",
        ),
        (
            "reservedMemory: [{numaNode: -1}]",
            "line 1: reservedMemory[0].numaNode: -1 is not between 0 and 1023",
        ),
        (
            "reservedMemory: [{numaNode: '0'}]",
            "line 1: reservedMemory[0].numaNode: must be a whole number, 0 to 1023, n",
        ),
        (
            "reservedMemory:\n- numaNode: 0\n  limits:\n    memory: 1gi",
            "line 4: reservedMemory[0].limits.memory: '1gi' is not an amount: 'gi' is not a suffix; did",
        ),
        (
            "reservedMemory: [{numaNode: 0, limits: {memory: 0}}]",
            "line 1: reservedMemory[0].limits.memory: must be more than 0",
        ),
        (
            "reservedMemory: [{numaNode: 0, limits: {memory: -1}}]",
            "line 1: reservedMemory[0].limits.memory: -1 is negative",
        ),
        (
            "reservedMemory: [{numaNode: 0, limits: {memory: ~}}]",
            "line 1: reservedMemory[0].limits.memory: has no value",
        ),
        (
            "reservedMemory: [{numaNode: 0, limits: {cpu: 1}}]",
            "line 1: reservedMemory[0].limits.cpu: cannot be reserved, only memory and huge pages",
        ),
        (
            "reservedMemory: [{numaNode: 0, limits: {hugepages-: 1}}]",
            "line 1: reservedMemory[0].limits.hugepages-: cannot be reserved",
        ),
        (
            "reservedMemory: [{numaNode: 0, limits: {hugepages-1024Mi: 1Gi}}]",
            "line 1: reservedMemory[0].limits.hugepages-1024Mi: pages of that size are called hugepages-1Gi",
        ),
        (
            "reservedMemory:\n- {numaNode: 0, limits: {memory: 1}}\n- {numaNode: 0, limits: {memory: 1}}",
            "line 3: reservedMemory[1].limits.memory: NUMA node 0 keeps memory already, in an",
        ),
        (
            "evictionHard: {memory.avail: 1}",
            "line 1: evictionHard.memory.avail: unknown signal; did you mean memory.a",
        ),
        (
            "evictionHard: {memory.available: 5%}",
            "line 1: evictionHard.memory.available: '5%' is a share: write the",
        ),
        (
            "evictionHard: {memory.available: x}",
            "line 1: evictionHard.memory.available: 'x' is not an amount",
        ),
        ("explainHistory: 100001", "line 1: explainHistory: 100001 is not between 0 and 100000"),
        ("kubelet: {timeout: 6s}", "line 1: kubelet.timeout: 6s is outside 10ms to 5s"),
        (
            "kubelet: {pods: localhost}",
            "line 1: kubelet.pods: 'localhost': it must begin with https:// or http://",
        ),
        ("podsApi: /x", "line 1: podsApi: unknown key; did you mean kubelet.podsApi?"),
    ],
)
def test_refused_with_line_and_key(text: str, message: str) -> None:
    assert refused(text).startswith(message)


def test_a_value_that_contains_itself_is_an_error_and_no_crash() -> None:
    assert refused("reservedMemory: &a [*a]").startswith(
        "line 1: reservedMemory[0]: must be numaNode and limits"
    )
    assert refused(f"{CPU}: &a {{align-by-socket: *a}}").startswith(
        f"line 1: {CPU}.align-by-socket: must be a text"
    )


def test_aliases_do_not_multiply() -> None:
    limits = ", ".join(f"hugepages-{2 * i + 1}Mi: 1" for i in range(2000))
    text = f"a: &l {{{limits}}}\nreservedMemory: [&e {{numaNode: 0, limits: *l}}, {'*e, ' * 2000}]"
    begun = time.process_time()
    assert "NUMA node 0 keeps hugepages-1Mi already" in refused(text)
    assert time.process_time() - begun < 30


def test_a_fixed_mapping_is_a_value() -> None:
    one, same = FrozenMapping({0: FrozenMapping({"memory": 1})}), FrozenMapping({0: {"memory": 1}})
    assert one == same == {0: {"memory": 1}}
    assert one != FrozenMapping({0: FrozenMapping({"memory": 2})})
    assert hash(one) == hash(FrozenMapping({0: FrozenMapping({"memory": 1})}))
    assert hash(Config(reserved_memory=one)) != hash(Config())
    assert (repr(one), len(one)) == ("{0: {'memory': 1}}", 1)
    with pytest.raises(TypeError):
        one[0] = FrozenMapping()  # type: ignore[index]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2000) | st.floats() | st.sampled_from(["1Gi", "-1", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["numaNode", "limits", "memory", "full-pcpus-only", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(st.sampled_from([key for _, key, _ in keys(Config())]), JUNK)
def test_any_value_of_a_key_is_accepted_or_refused_by_its_name(key: str, value: object) -> None:
    try:
        parse(f"{key}: {json.dumps(value)}", "f.yaml")
    except ConfigError as error:
        message = str(error)
    else:
        return
    assert message.startswith("cannot use the configuration f.yaml: ")
    assert key in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cpu]", "devicePlugins.shim[0]: 'cpu' is not the name of an extended resource"),
        ("[a.b/c, kubernetes.io/x]", "'kubernetes.io/x' is not the name of an extended resource"),
        ("a.b/c", "must be a list of extended resources"),
        (f"[{', '.join(f'a.b/{n}' for n in range(129))}]", "more than 128 resources"),
    ],
)
def test_resources_that_are_refused(text: str, message: str) -> None:
    assert message in refused(f"devicePlugins: {{shim: {text}}}")


def test_resources_are_named_once() -> None:
    config = parse("devicePlugins: {shim: [a.b/c, d.e/f, a.b/c]}", "test")
    assert config.device_plugins.shim == ("a.b/c", "d.e/f")
