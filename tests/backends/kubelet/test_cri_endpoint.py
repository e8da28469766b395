"""Files that lead kubelet to another runtime endpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.backends.kubelet.cri_endpoint import other_endpoints

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


def test_files_that_cannot_be_read_name_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    (tmp_path / "instance-config.yaml").write_bytes(b"\xff" * 100_000)
    (tmp_path / "kubeadm-flags.env").write_text("no flag here\n")
    assert other_endpoints(tmp_path, OURS) == []
