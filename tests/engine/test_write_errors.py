"""What is done about each way in which the kernel can refuse."""

from __future__ import annotations

import errno

import pytest

from proxy.engine.write_errors import PAUSE_S, TRIES, WriteAction, action_for, retry_pause


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((errno.ENOENT, errno.ENODEV), WriteAction.LOOK),
        ((errno.EBUSY, errno.EAGAIN, errno.EINTR, 0), WriteAction.RETRY),
        ((errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EINVAL, errno.EIO, 9999), WriteAction.ELSEWHERE),
        ((errno.EROFS,), WriteAction.REFUSE),
    ],
)
def test_the_way_out(numbers: tuple[int, ...], expected: WriteAction) -> None:
    assert {action_for(number) for number in numbers} == {expected}


def test_the_same_write_is_made_again_a_bounded_number_of_times() -> None:
    waits = [retry_pause(tried, (errno.EACCES, errno.EBUSY)) for tried in range(1, TRIES + 1)]
    assert waits == [PAUSE_S, 4 * PAUSE_S, None]
    assert retry_pause(1, (errno.EACCES, errno.ENOSPC)) is None, "it would fail for ever"
    assert retry_pause(1, ()) is None
