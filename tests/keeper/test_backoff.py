from __future__ import annotations

from proxy.keeper.backoff import BackOff


def test_a_few_times_at_once_then_ever_more_rarely() -> None:
    patience, tried = BackOff(), []
    for number in range(120):
        patience.tick({"a"})
        if patience.due("a"):
            tried.append(number)
            patience.again("a")
    assert tried == [0, 1, 2, 3, 5, 9, 17, 33, 65, 97]
    assert patience.due("b")


def test_calm_and_gone_begin_anew() -> None:
    patience = BackOff()
    for there in ({"a"}, {"a"}, {"a"}, set()):
        patience.tick(there)
        for _ in range(9 if there else 0):
            patience.again("a")
    assert patience.due("a")
    for _ in range(9):
        patience.again("a")
    assert not patience.due("a")
    patience.calm("a")
    assert patience.due("a")
