"""Log lines that a client can cause."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.telemetry.port import KEYS, Throttle


class CapturedLog:
    def __init__(self, **options):
        self.now, self.lines = 1000.0, []
        self.throttle = Throttle(lambda: self.now, **options)

    def say(self, key, line):
        admitted = self.throttle.admit(key)
        if admitted is not None:
            missed, others = admitted
            if others:
                self.lines.append(f"{others} lines were left out")
            self.lines.append(f"{line} ({missed} more)" if missed else line)

    def flood(self, count, key="k"):
        for number in range(count):
            self.say(key, f"line {number}")


def test_the_first_few_are_written_then_one_a_minute_with_a_count():
    said = CapturedLog(burst=3)
    said.flood(1000)
    assert said.lines == ["line 0", "line 1", "line 2"]
    said.now += 61
    said.flood(1000)
    assert said.lines[3:] == ["line 0 (997 more)"]
    said.now += 61
    said.flood(2)
    assert said.lines[4:] == ["line 0 (999 more)"]


def test_after_a_quiet_minute_the_first_few_are_written_again():
    said = CapturedLog(burst=3)
    said.flood(10)
    said.now += 61
    said.flood(1)
    said.now += 61
    said.flood(3)
    assert said.lines[-3:] == ["line 0", "line 1", "line 2"]


def test_keys_do_not_suffer_from_each_other_up_to_a_limit_of_all():
    said = CapturedLog(burst=2, total=5)
    for key in range(4):
        said.flood(2, key)
    assert len(said.lines) == 5
    said.now += 61
    said.say("x", "next")
    assert said.lines[5:] == ["3 lines were left out", "next"]


def test_the_memory_of_keys_is_bounded():
    said = CapturedLog(total=10)
    for key in range(20_000):
        said.say(key, "line")
    assert len(said.throttle._windows) <= KEYS
    assert len(said.lines) == 10


def test_a_clock_that_is_set_back_does_not_silence_anything():
    said = CapturedLog(burst=1)
    said.flood(2)
    said.now -= 100_000
    said.flood(1)
    assert len(said.lines) == 2


@given(st.lists(st.tuples(st.floats(0, 90), st.integers(0, 5)), max_size=200))
def test_every_line_is_written_or_counted(calls):
    said, made = CapturedLog(burst=2, total=1000), 0
    for wait, key in calls:
        said.now += wait
        said.say(key, "line")
        made += 1
    reported = sum(1 + int(line.partition("(")[2].split()[0] if "(" in line else 0) for line in said.lines)
    waiting = sum(window.missed for window in said.throttle._windows.values())
    assert reported + waiting == made
