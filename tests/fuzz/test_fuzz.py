"""A minute of the fuzzers with a fixed seed; ``make fuzz`` runs them without end."""

import random
import time

import pytest

from tests.executor.conftest import MemoryLedger
from tests.fuzz import bodies, sessions
from tests.fuzz.__main__ import main
from tests.fuzz.outcome import FuzzError, Outcome, run

SEED = 12


@pytest.mark.timeout(180)
def test_sessions_survive_random_peers():
    outcome = run("sessions", sessions.one, SEED, 40)
    print(outcome)
    assert outcome.seen["requests"] > 100
    assert outcome.seen["unusual"] > 100
    assert outcome.seen["crowded out"] > 10
    assert outcome.seen["honest calls beside odd ones"] > 100


@pytest.mark.timeout(120)
def test_interceptors_survive_random_bodies():
    outcome = run("bodies", bodies.one, SEED, 20)
    print(outcome)
    assert outcome.seen["released"] > 200
    assert outcome.seen["refused"] > 20


def test_a_slow_ledger_is_waited_for(monkeypatch):
    write = MemoryLedger.write

    def write_late(ledger, changes):
        time.sleep(0.1)
        write(ledger, changes)

    monkeypatch.setattr(MemoryLedger, "write", write_late)
    monkeypatch.setattr(bodies, "CALLS", 1)
    bodies.one(random.Random(SEED), Outcome("bodies"))


def test_a_failure_can_be_reproduced(monkeypatch, capsys):
    def one(rng: random.Random, outcome: Outcome) -> None:
        for _ in range(100):
            outcome.timed(lambda: rng.random())
            assert rng.random() < 0.999

    with pytest.raises(FuzzError, match=r"--seed 5 --round (\d+)") as found:
        run("sessions", one, 5, 60)
    monkeypatch.setattr("tests.fuzz.__main__.FUZZERS", {"sessions": one, "bodies": one})
    turn = str(found.value).rpartition(" ")[2]
    assert main(["--only", "sessions", "--seed", "5", "--round", turn]) == 1
    again = capsys.readouterr().err
    assert again.partition(": Assertion")[0] == str(found.value).partition(": Assertion")[0]


def test_a_step_that_takes_far_too_long_fails(monkeypatch):
    monkeypatch.setattr("tests.fuzz.outcome.GROSS_S", 0.0)
    with pytest.raises(AssertionError, match="it took"):
        Outcome("x").timed(lambda: None)
