"""The measurements of device plugins with the real daemon, and the invariants while they misbehave."""

from __future__ import annotations


def test_no_create_hangs_and_no_device_is_given_twice_while_plugins_misbehave() -> None:
    """``make device-chaos`` creates 10,000 containers."""
    import device_chaos

    chaos = device_chaos.measure(400)
    assert chaos.wrong == []
    assert (chaos.hung, chaos.without_devices) == (0, 0), chaos.took
    assert len(chaos.took[True]) > 100
    assert len(device_chaos.rows(chaos)[0]) == len(device_chaos.HEAD)


def test_lists_of_a_thousand_devices_are_measured() -> None:
    """The duration is not checked."""
    import device_list_figures

    took = device_list_figures.measure(5)
    assert len(took) >= 5
    assert all(ms > 0 for ms in took)
    assert len(device_list_figures.rows(took)[0]) == len(device_list_figures.HEAD)
