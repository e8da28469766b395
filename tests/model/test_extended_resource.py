"""Names of extended resources."""

from __future__ import annotations

import pytest

from proxy.model.devices import is_extended_resource


@pytest.mark.parametrize(
    "name",
    ["nvidia.com/gpu", "example.com/a.b_C-1", "x/y", "a" * 244 + "/dev", "example.com/" + "n" * 63, "1a/0"],
)
def test_valid_names_are_accepted(name: str) -> None:
    assert is_extended_resource(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "gpu",
        "cpu",
        "kubernetes.io/gpu",
        "sub.kubernetes.io/gpu",
        "requests.nvidia.com/gpu",
        "nvidia.com/",
        "/gpu",
        "nvidia.com/gpu/1",
        "NVIDIA.com/gpu",
        "nvidia..com/gpu",
        "-nvidia.com/gpu",
        "nvidia.com/-gpu",
        "nvidia.com/gpu_",
        "nvidia.com/g pu",
        "nvidia.com/gpu\n",
        "a" * 245 + "/dev",
        "example.com/" + "n" * 64,
    ],
)
def test_invalid_names_are_rejected(name: str) -> None:
    assert not is_extended_resource(name)
