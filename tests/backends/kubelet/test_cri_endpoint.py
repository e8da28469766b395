"""Files that lead kubelet to another runtime endpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.backends.kubelet.cri_endpoint import kubelet_files, named_endpoints, other_endpoints, running_flags

OURS = Path("/run/topoproxy/cri.sock")
ELSEWHERE = "unix:///run/containerd/containerd.sock"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "kubeadm-flags.env",
            f'KUBELET_KUBEADM_ARGS="--v=2 --container-runtime-endpoint={ELSEWHERE} --x=y"\n',
        ),
        ("kubeadm-flags.env", f'KUBELET_KUBEADM_ARGS="--container-runtime-endpoint {ELSEWHERE}"\n'),
        ("instance-config.yaml", f"kind: KubeletConfiguration\ncontainerRuntimeEndpoint: {ELSEWHERE}\n"),
        ("config.yaml", f'a: b\ncontainerRuntimeEndpoint: "{ELSEWHERE}"  # as it was\n'),
    ],
)
def test_a_file_that_names_another_endpoint(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert other_endpoints(tmp_path, OURS) == [(tmp_path / name, ELSEWHERE)]
    (tmp_path / name).write_text(text.replace(ELSEWHERE, f"unix://{OURS}"))
    assert other_endpoints(tmp_path, OURS) == []


def test_the_file_that_wins_comes_first(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("containerRuntimeEndpoint: unix:///a\n")
    (tmp_path / "kubeadm-flags.env").write_text("--container-runtime-endpoint=unix:///b\n")
    assert [endpoint for _, endpoint in other_endpoints(tmp_path, OURS)] == ["unix:///b", "unix:///a"]


def test_files_that_cannot_be_read_give_no_endpoint(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    (tmp_path / "instance-config.yaml").write_bytes(b"\xff" * 100_000)
    (tmp_path / "kubeadm-flags.env").write_text("no flag here\n")
    assert other_endpoints(tmp_path, OURS) == []


@pytest.mark.parametrize("null", ["null", "Null", "NULL", "~"])
def test_a_null_is_no_endpoint(tmp_path: Path, null: str) -> None:
    for text in (f"containerRuntimeEndpoint: {null}\n", f'{{"containerRuntimeEndpoint":{null}}}'):
        (tmp_path / "config.yaml").write_text(text)
        assert named_endpoints(tmp_path) == []


def test_drop_ins_win_over_the_configuration_of_the_running_kubelet(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("containerRuntimeEndpoint: unix:///own\n")
    (tmp_path / "config.yaml").write_text("containerRuntimeEndpoint: unix:///unused\n")
    flags = {"config": str(own), "config-dir": str(tmp_path / "conf.d")}
    assert named_endpoints(tmp_path, flags) == [(own, "unix:///own")]
    drop_ins = tmp_path / "conf.d"
    drop_ins.mkdir()
    for name, text in (
        ("10-a.conf", '{"containerRuntimeEndpoint": "unix:///a", "kind": "KubeletConfiguration"}'),
        ("20-b.conf", "containerRuntimeEndpoint: unix:///b\n"),
        ("30-c.conf", "maxPods: 9\n"),
        ("40-d.yaml", "containerRuntimeEndpoint: unix:///d\n"),
    ):
        (drop_ins / name).write_text(text)
    assert named_endpoints(tmp_path, flags) == [(drop_ins / "20-b.conf", "unix:///b"), (own, "unix:///own")]
    (drop_ins / "20-b.conf").unlink()
    assert named_endpoints(tmp_path, flags)[0] == (drop_ins / "10-a.conf", "unix:///a")
    assert named_endpoints(tmp_path) == [(tmp_path / "config.yaml", "unix:///unused")]


def test_the_flags_of_the_running_kubelet(tmp_path: Path) -> None:
    assert running_flags(tmp_path / "none") is None
    for pid, cmdline in ((1, "/sbin/init"), (20, "/usr/bin/kubelet\0--v=2\0--config\0/k.yaml\0--v=3\0--x")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_text(cmdline)
    (tmp_path / "7").mkdir()
    assert running_flags(tmp_path) == {"v": "3", "config": "/k.yaml", "x": ""}
    (tmp_path / "20/cmdline").write_text("/usr/bin/kubelet-helper\0--v=2")
    assert running_flags(tmp_path) is None


def test_a_masked_unit_is_not_the_unit_of_kubelet(tmp_path: Path) -> None:
    shipped = tmp_path / "usr/lib/systemd/system/kubelet.service"
    own = tmp_path / "etc/systemd/system/kubelet.service"
    for unit in (shipped, own):
        unit.parent.mkdir(parents=True)
    shipped.write_text(f"[Service]\nExecStart=/usr/bin/kubelet --container-runtime-endpoint={ELSEWHERE}\n")
    assert kubelet_files(tmp_path / "kubelet", root=tmp_path).unit == "kubelet.service"
    own.symlink_to("/dev/null")
    assert kubelet_files(tmp_path / "kubelet", root=tmp_path).unit == ""
    own.unlink()
    own.touch()
    assert kubelet_files(tmp_path / "kubelet", root=tmp_path).unit == ""
    own.unlink()
    own.symlink_to(tmp_path / "missing.service")
    assert kubelet_files(tmp_path / "kubelet", root=tmp_path).unit == ""
