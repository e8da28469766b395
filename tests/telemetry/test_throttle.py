"""Log lines that a client can cause."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.telemetry.port import THROTTLE_KEYS, Throttle


class CapturedLog:
    def __init__(self, **options):
        self.now, self.lines = 1000.0, []
        self.throttle = Throttle(lambda: self.now, **options)

    def write(self, key, line):
        admitted = self.throttle.admit(key)
        if admitted is not None:
            missed, others = admitted
            if others:
                self.lines.append(f"{others} lines were left out")
            self.lines.append(f"{line} ({missed} more)" if missed else line)

    def flood(self, count, key="k"):
        for number in range(count):
            self.write(key, f"line {number}")


def test_the_first_lines_are_written_then_one_a_minute_with_a_count():
    log = CapturedLog(burst=3)
    log.flood(1000)
    assert log.lines == ["line 0", "line 1", "line 2"]
    log.now += 61
    log.flood(1000)
    assert log.lines[3:] == ["line 0 (997 more)"]
    log.now += 61
    log.flood(2)
    assert log.lines[4:] == ["line 0 (999 more)"]


def test_after_a_quiet_minute_the_first_lines_are_written_again():
    log = CapturedLog(burst=3)
    log.flood(10)
    log.now += 61
    log.flood(1)
    log.now += 61
    log.flood(3)
    assert log.lines[-3:] == ["line 0", "line 1", "line 2"]


def test_keys_are_limited_separately_and_by_a_common_limit():
    log = CapturedLog(burst=2, total=5)
    for key in range(4):
        log.flood(2, key)
    assert len(log.lines) == 5
    log.now += 61
    log.write("x", "next")
    assert log.lines[5:] == ["3 lines were left out", "next"]


def test_the_number_of_remembered_keys_is_limited():
    log = CapturedLog(total=10)
    for key in range(20_000):
        log.write(key, "line")
    assert len(log.throttle._windows) <= THROTTLE_KEYS
    assert len(log.lines) == 10


def test_a_clock_that_is_set_back_does_not_suppress_lines():
    log = CapturedLog(burst=1)
    log.flood(2)
    log.now -= 100_000
    log.flood(1)
    assert len(log.lines) == 2


@given(st.lists(st.tuples(st.floats(0, 90), st.integers(0, 5)), max_size=200))
def test_every_line_is_written_or_counted(calls):
    log, calls_made = CapturedLog(burst=2, total=1000), 0
    for wait, key in calls:
        log.now += wait
        log.write(key, "line")
        calls_made += 1
    reported = sum(1 + int(line.partition("(")[2].split()[0] if "(" in line else 0) for line in log.lines)
    pending = sum(window.missed for window in log.throttle._windows.values())
    assert reported + pending == calls_made
