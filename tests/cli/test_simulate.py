"""``topoproxy simulate``."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from proxy.cli.simulate import simulate
from proxy.cli.topology import to_text
from proxy.model.errors import CannotCreateError, ConfigError, InputError, TopoproxyError, UsageError
from proxy.topology.facts import machine_to_json
from proxy.topology.regular_machine import regular_machine
from proxy.topology.sysfs_writer import write_sysfs

POD = """\
apiVersion: v1
kind: Pod
metadata: {name: job}
spec:
  containers:
  - name: main
    resources: {limits: {cpu: 6, memory: 1Gi}}
"""


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a pod, a machine of 16 CPUs on two nodes, and two configurations."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pod.yaml").write_text(POD)
    (tmp_path / "m.json").write_text(to_text(machine_to_json(regular_machine(2, 1, 4))))
    (tmp_path / "static.yaml").write_text("cpuManagerPolicy: static\n")
    (tmp_path / "single.yaml").write_text(
        "cpuManagerPolicy: static\ntopologyManagerPolicy: single-numa-node\n"
    )
    return tmp_path


def invoke(args: str, stdin: str = "") -> Result:
    result = CliRunner().invoke(simulate, shlex.split(args), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert result.stdout == "", "a failed command prints no partial result"
        raise result.exception
    return result


def run(args: str, stdin: str = "") -> str:
    result = invoke(args, stdin)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def test_pods_are_placed_on_a_described_machine() -> None:
    out = run("pod.yaml --replicas 3 --machine m.json --config single.yaml")
    assert out.splitlines()[:3] == [
        "m: 2 pods, 12 of 16 CPUs owned; requested: cpu 12 of 16, memory 2 GiB of 128 GiB",
        "  node 0  ######..  6 owned  2 left  1 pod",
        "  node 1  ######..  6 owned  2 left  1 pod",
    ]
    assert "default/job-3: unschedulable: m has too little cpu" in out


def test_the_machine_may_be_a_sysfs_tree(workspace: Path) -> None:
    write_sysfs(regular_machine(2, 1, 4), workspace / "root")
    out = run("pod.yaml --sysfs-root root --config static.yaml")
    assert "machine: 1 pod, 6 of 16 CPUs owned" in out


def test_the_machine_may_be_that_of_the_configuration(workspace: Path) -> None:
    write_sysfs(regular_machine(2, 1, 4), workspace / "root")
    (workspace / "here.yaml").write_text(
        f"sysfsRoot: {workspace}/root/sys\nprocfsRoot: {workspace}/root/proc\n"
    )
    assert "machine: 1 pod, 0 of 16 CPUs owned" in run("pod.yaml --config here.yaml")


def test_a_machine_that_is_too_small_for_a_pod_is_named(workspace: Path) -> None:
    """The example of the help, on a laptop with two CPUs."""
    write_sysfs(regular_machine(1, 1, 2, 1), workspace / "laptop")
    (workspace / "two.yaml").write_text(POD.replace("cpu: 6", "cpu: 2"))
    out = run("two.yaml --sysfs-root laptop --config static.yaml --replicas 5")
    assert "  rejected                   5" in out
    note = "machine is too small for 5 pods that requested 2 CPUs of their own: of its 2 CPUs, 1 can be owned"
    assert out.splitlines()[-1] == f"note: {note}"
    data = json.loads(run("two.yaml --sysfs-root laptop --config static.yaml --json"))
    assert data["notes"] == [
        "machine is too small for 1 pod that requested 2 CPUs of its own: of its 2 CPUs, 1 can be owned"
    ]
    roomy = run("pod.yaml --machine m.json --config static.yaml --replicas 3")
    assert "too small" not in roomy


def test_pods_from_standard_input_may_be_repeated() -> None:
    out = run("- --machine a=m.json --machine b=m.json --nodes 2 --config static.yaml --replicas 4", POD)
    assert [line.split(":")[0] for line in out.splitlines() if " owned; " in line] == [
        "a-1",
        "a-2",
        "b-1",
        "b-2",
    ]


@pytest.mark.parametrize(
    ("args", "text", "message"),
    [
        ("-", "", "cannot simulate pods: no pods found in standard input"),
        ("-", "kind: Pod", "cannot read the pod in standard input line 1: apiVersion: is missing"),
        ("-", "kind: List", "cannot read the list in standard input line 1: items must be a list"),
        (
            "--cluster -",
            "kind: Fleet\na: 1",
            "cannot read the fleet in standard input line 1: a: is not known",
        ),
        (
            "--cluster -",
            "kind: Node",
            "cannot read the Node in standard input line 1: metadata.name is missing",
        ),
        ("pod.yaml --devices -", "[]", "cannot read the devices of standard input: it must be one mapping"),
        (
            "pod.yaml --devices -",
            "a.b/c: [{id: a, numa: [9]}]",
            "cannot use the devices of standard input: a.b/c a is near NUMA node 9",
        ),
    ],
)
def test_standard_input_is_called_by_its_name(args: str, text: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        invoke(f"{args} --machine m.json", text)
    assert str(refused.value).startswith(message)


def test_the_result_can_be_printed_as_json() -> None:
    data = json.loads(
        run("pod.yaml --replicas 3 --machine m.json --config single.yaml --explain job-1 --json")
    )
    assert data["schema"] == "topoproxy-simulate/1"
    assert data["configuration"] == "single.yaml"
    assert data["summary"]["placed"] == 2
    assert data["summary"]["unschedulable"] == {"cpu": 1}
    machine = data["machines"][0]
    assert machine["cpus"] == {
        "online": "0-15",
        "reserved": "",
        "owned": "0-2,4-6,8-10,12-14",
        "left": "3,7,11,15",
    }
    assert machine["left"] == {"cpus": 4, "whole": 4, "largest": 2, "largest_whole": 2, "of": 8}
    assert (machine["offered"]["cpu"], machine["asked"]["cpu"]) == (16000, 12000)
    assert [node["owned"] for node in machine["nodes"]] == ["0-2,8-10", "4-6,12-14"]
    first, _, last = data["pods"]
    assert (first["pod"], first["outcome"], first["machine"], first["together"]) == (
        "default/job-1",
        "placed",
        "m",
        True,
    )
    assert first["from"] == "pod.yaml line 1"
    container = first["containers"][0]
    assert (container["name"], container["pool"], container["cpus"], container["mems"]) == (
        "main",
        "own",
        "0-2,8-10",
        "0",
    )
    assert first["explanations"][0]["cpus"] == "0-2,8-10"
    assert "explanations" not in last
    assert (last["outcome"], last["machine"], last["lacking"]) == ("unschedulable", None, ["cpu"])


def test_the_json_has_the_memory_of_each_node(workspace: Path) -> None:
    (workspace / "counted.yaml").write_text(
        "cpuManagerPolicy: static\nmemoryManagerPolicy: Static\n"
        "reservedMemory: [{numaNode: 0, limits: {memory: 1Gi}}]\n"
    )
    data = json.loads(run("pod.yaml --machine m.json --config counted.yaml --json"))
    first, second = data["machines"][0]["nodes"]
    assert first["memory"] == {"given": 1 << 30, "of": 63 << 30}
    assert second["memory"] == {"given": 0, "of": 64 << 30}
    container = data["pods"][0]["containers"][0]
    assert container["memory"] == [{"nodes": [0], "resource": "memory", "bytes": 1 << 30}]


def test_two_configurations_are_compared() -> None:
    args = "pod.yaml --replicas 2 --machine m.json --config static.yaml --compare /dev/null"
    out = run(f"{args} --explain job-2")
    assert "A: static.yaml\nB: /dev/null\n" in out
    assert "2 pods: together under A, sharing under B" in out
    assert "\nA: default/job-2: placed on m\n" in out
    assert "\nB: default/job-2: placed on m\n" in out
    data = json.loads(run(f"{args} --json"))
    assert (data["a"]["summary"]["together"], data["b"]["summary"]["together"]) == (2, 0)
    assert [each["pod"] for each in data["differences"]] == ["default/job-1", "default/job-2"]


def test_devices_from_a_file_are_given_out_and_shown_by_node(workspace: Path) -> None:
    (workspace / "d.yaml").write_text("example.com/gpu: [{id: g1, numa: [1]}]")
    (workspace / "gpu.yaml").write_text(POD.replace("cpu: 6,", "cpu: 2, example.com/gpu: 1,"))
    out = run("gpu.yaml --machine m.json --config single.yaml --devices d.yaml")
    assert "  node 1  ##......  2 owned  6 left  example.com/gpu 1 of 1  1 pod" in out


def test_the_exit_code_depends_on_refused_pods() -> None:
    args = "pod.yaml --machine m.json --config static.yaml --fail-on-refused --replicas"
    assert invoke(f"{args} 2").exit_code == 0
    result = invoke(f"{args} 3")
    assert (result.exit_code, "too little cpu" in result.stdout) == (1, True)


def test_progress_is_for_terminals_or_on_request() -> None:
    args = "pod.yaml --machine m.json --config static.yaml --replicas 2"
    assert invoke(args).stderr == ""
    result = invoke(f"{args} --progress")
    assert "2 of 2 pods" in result.stderr
    assert result.stdout == invoke(args).stdout


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ("no.yaml --machine m.json", InputError, "cannot read no.yaml: No such file"),
        ("pod.yaml --machine no.json", InputError, "cannot read the machine description no.json"),
        ("pod.yaml --machine m.json --machine m.json", InputError, "two machines are named m"),
        ("pod.yaml --sysfs-root .", InputError, "cannot read the machine"),
        ("pod.yaml --machine m.json --devices pod.yaml", InputError, "not a name of a device resource"),
        ("static.yaml --machine m.json", InputError, "static.yaml, line 1: it has no kind"),
        ("pod.yaml --machine m.json --config no.yaml", ConfigError, "there is no such file"),
        ("pod.yaml --machine m.json --config pod.yaml", ConfigError, "pod.yaml"),
        ("pod.yaml --machine m.json --compare r.yaml", ConfigError, "there is no CPU 99"),
        ("pod.yaml --machine m.json --sysfs-root .", UsageError, "both name the machine"),
        ("pod.yaml --machine m.json --explain jab", UsageError, "did you mean default/job"),
    ],
)
def test_invalid_input_is_refused(
    workspace: Path, args: str, error: type[TopoproxyError], message: str
) -> None:
    (workspace / "r.yaml").write_text("reservedSystemCPUs: 99")
    with pytest.raises(error, match=message):
        invoke(args)


def test_the_process_ends_with_the_exit_code_of_the_error(workspace: Path) -> None:
    def code(*args: str) -> tuple[int, str]:
        result = subprocess.run(
            [sys.executable, "-m", "proxy", "simulate", *args], capture_output=True, text=True, timeout=60
        )
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("topoproxy: cannot ")
        return result.returncode, result.stderr

    (workspace / "bad.yaml").write_text("kind: Service")
    assert code("bad.yaml", "--machine", "m.json")[0] == 65
    (workspace / "config.yaml").write_text("mode: x")
    assert code("pod.yaml", "--machine", "m.json", "--config", "config.yaml")[0] == 78


def test_the_help_has_examples() -> None:
    out = CliRunner().invoke(simulate, ["--help"]).stdout
    for word in ("topoproxy topology --json", "--compare", "kubectl", "cpuManagerPolicy: static", "65"):
        assert word in out


FLEET = """
kind: Fleet
nodes: [{count: 3, cpus: 16}]
pods: [{resources: {limits: {cpu: 3, memory: 1Gi}}}]
fill: 1.2
"""


def test_a_cluster_is_simulated_with_both_schedulers(workspace: Path) -> None:
    (workspace / "fleet.yaml").write_text(FLEET)
    reported = run("--cluster fleet.yaml")
    assert reported.startswith("3 nodes, 6 NUMA nodes, 45 CPUs that can be owned\n")
    assert re.search(r"^ +stock  with extender$", reported, re.M)
    data = json.loads(run("--cluster fleet.yaml --json --verbose --seed 7 --svg fleet.svg"))
    assert data["schema"] == "topoproxy-simulate-cluster/1"
    assert data["settings"]["seed"] == 7
    assert [each["scheduler"] for each in data["runs"]] == ["stock", "with extender"]
    assert [len(each["each_pod"]) for each in data["runs"]] == [data["fleet"]["pods"]] * 2
    assert (workspace / "fleet.svg").read_text().startswith("<svg ")


def test_nodes_of_a_cluster_may_be_described_machines(workspace: Path) -> None:
    data = json.loads(
        run("--cluster pod.yaml --machine m.json --nodes 3 --replicas 4 --config single.yaml --json")
    )
    assert (data["fleet"]["nodes"], data["fleet"]["pods"]) == (3, 4)
    assert [each["placed"] for each in data["runs"]] == [4, 4]


def test_a_cluster_too_small_for_its_pods_ends_with_1_if_requested(workspace: Path) -> None:
    (workspace / "fleet.yaml").write_text(FLEET)
    assert invoke("--cluster fleet.yaml --fail-on-refused").exit_code == 1
    (workspace / "fleet.yaml").write_text(FLEET.replace("1.2", "0.2"))
    assert invoke("--cluster fleet.yaml --fail-on-refused").exit_code == 0


@pytest.mark.parametrize("rate", ["1e-6", "1e6"])
@pytest.mark.parametrize("lifetime", ["0", "1e-320", "1e9"])
def test_the_smallest_and_the_largest_times_make_valid_json(
    workspace: Path, rate: str, lifetime: str
) -> None:
    (workspace / "fleet.yaml").write_text(FLEET)
    args = f"--cluster fleet.yaml --arrival poisson --rate {rate} --lifetime {lifetime} --svg f.svg --json"
    data = json.loads(run(args))
    assert len(data["runs"]) == 2
    assert not {"inf", "nan"} & set(re.findall(r"[a-z]+", (workspace / "f.svg").read_text()))


@pytest.mark.parametrize("rate", ["0", "1e-320", "1e7"])
def test_a_rate_out_of_range_is_a_wrong_command_line(workspace: Path, rate: str) -> None:
    (workspace / "fleet.yaml").write_text(FLEET)
    result = invoke(f"--cluster fleet.yaml --arrival poisson --rate {rate} --json")
    assert result.exit_code == 2
    assert "is not in the range 1e-06<=x<=1000000.0." in result.stderr


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ("pod.yaml --seed 1", UsageError, "cannot use --seed without --cluster"),
        (
            "pod.yaml --percentage-of-nodes 5",
            UsageError,
            "cannot use --percentage-of-nodes without --cluster",
        ),
        ("--cluster fleet.yaml --fill", UsageError, "cannot use --fill with --cluster"),
        ("--cluster fleet.yaml --compare static.yaml", UsageError, "cannot use --compare with --cluster"),
        ("--cluster fleet.yaml --rate 5", UsageError, "cannot use --rate without --arrival poisson"),
        ("--cluster none.yaml", InputError, "cannot read none.yaml: No such file or directory"),
        ("--cluster pod.yaml", InputError, "cannot simulate a cluster without nodes: "),
        (
            "--cluster fleet.yaml --svg no/such.svg",
            CannotCreateError,
            "cannot write the picture no/such.svg: ",
        ),
    ],
)
def test_a_wrong_command_line_for_a_cluster_is_refused(
    workspace: Path, args: str, error: type[TopoproxyError], message: str
) -> None:
    (workspace / "fleet.yaml").write_text(FLEET)
    with pytest.raises(error) as refused:
        invoke(args)
    assert str(refused.value).startswith(message)


def test_a_fleet_without_its_option_names_the_option(workspace: Path) -> None:
    (workspace / "fleet.yaml").write_text(FLEET)
    with pytest.raises(InputError, match=r"'Fleet' is not supported .* --cluster reads fleets and nodes"):
        invoke("fleet.yaml")


def test_a_picture_that_cannot_be_written_is_refused_before_the_simulation(workspace: Path) -> None:
    (workspace / "fleet.yaml").write_text("kind: Fleet")
    with pytest.raises(CannotCreateError, match=r"cannot write the picture \.: Is a directory"):
        invoke("--cluster fleet.yaml --svg .")


def test_the_progress_of_a_cluster_is_a_bar(workspace: Path) -> None:
    (workspace / "fleet.yaml").write_text(FLEET)
    result = invoke("--cluster fleet.yaml --progress")
    assert "[" + "#" * 30 + "]" in result.stderr
    assert re.search(r"\r\d+ pods in [\d.]+ s", result.stderr)


def test_the_example_of_the_help_places_a_pod_on_a_machine_of_two_cpus(workspace: Path) -> None:
    manifest = re.search(r"echo '(\{apiVersion.*?)' > pod.yaml", simulate.help or "", re.DOTALL)
    assert manifest is not None
    (workspace / "pod.yaml").write_text(manifest[1])
    (workspace / "here.json").write_text(to_text(machine_to_json(regular_machine(1, 1, 2, 1))))
    command = re.search(r"topoproxy simulate (pod.yaml .*?)\n\n", simulate.help or "", re.DOTALL)
    assert command is not None
    out = run(command[1].replace("\\\n", " "))
    assert "default/job-1: placed on here" in out
