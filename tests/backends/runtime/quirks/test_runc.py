"""The masks that runc sends to systemd."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.runtime.quirks.runc import byte_reversed_mask
from proxy.model.idset import CpuSet

cpus_of = CpuSet.parse


@given(st.sets(st.integers(0, 80), min_size=1))
def test_a_mask_reversed_twice_is_unchanged_unless_bytes_are_lost(ids: set[int]) -> None:
    cpus = CpuSet(ids)
    wrong = byte_reversed_mask(cpus)
    assert len(wrong) == len(cpus)
    if cpus.bits & 0xFF:
        assert byte_reversed_mask(wrong) == cpus


def test_the_masks_equal_those_of_runc() -> None:
    assert byte_reversed_mask(cpus_of("20-23")) == cpus_of("4-7")  # seen with runc 1.1.5
    assert byte_reversed_mask(cpus_of("10-23")) == cpus_of("0-7,10-15")  # from its change log
    assert byte_reversed_mask(cpus_of("0-6")) == cpus_of("0-6")
