"""Owners of fields, and merged answers."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.hooks.answers import CLEAR, NOTHING, Adjustment, Update
from proxy.hooks.engine.claims import AnswerFields, FieldClaims, field_names, fields_set_by
from proxy.model.idset import CpuSet, Mask

KEYS = st.sampled_from("abcd")
TEXTS = st.sampled_from(["", "1", "two"]) | st.just(CLEAR)
UPDATES: st.SearchStrategy[Update] = st.builds(
    Update,
    cpus=st.sampled_from([CpuSet([1]), CLEAR]),
    unified=st.dictionaries(KEYS, st.just("x"), min_size=1, max_size=2),
) | st.builds(Update, cpu_shares=st.integers(2, 9))
ANSWERS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "cpus": st.just(CpuSet([0, 1])) | st.just(CLEAR),
        "mems": st.just(Mask([0])),
        "cpu_shares": st.integers(2, 9),
        "envs": st.dictionaries(KEYS, TEXTS, min_size=1, max_size=3),
        "annotations": st.dictionaries(KEYS, TEXTS, min_size=1, max_size=3),
        "updates": st.dictionaries(KEYS, UPDATES, min_size=1, max_size=2),
    },
)


def merge(answers: list[tuple[str, AnswerFields]]) -> tuple[FieldClaims, list[str]]:
    claims = FieldClaims()
    return claims, [claims.claim(name, reported) for name, reported in answers]


def test_owners_are_named_by_field_by_key_and_by_field_of_a_key() -> None:
    claims, clashes = merge(
        [
            ("10-a", {"cpus": CpuSet([1]), "envs": {"A": "1"}}),
            (
                "20-b",
                {"envs": {"B": CLEAR}, "updates": {"id": Update(cpu_quota=-1, unified={"memory.high": "1"})}},
            ),
            ("30-c", {"updates": {"id": Update(cpus=CpuSet([2]), unified={"memory.low": "2"})}}),
        ]
    )
    assert clashes == ["", "", ""]
    assert dict(claims.owners) == {
        "cpus": "10-a",
        "envs[A]": "10-a",
        "envs[B]": "20-b",
        "updates[id].cpu_quota": "20-b",
        "updates[id].unified[memory.high]": "20-b",
        "updates[id].cpus": "30-c",
        "updates[id].unified[memory.low]": "30-c",
    }
    assert claims.merged() == Adjustment(
        cpus=CpuSet([1]),
        envs={"A": "1", "B": CLEAR},
        updates={
            "id": Update(cpus=CpuSet([2]), cpu_quota=-1, unified={"memory.high": "1", "memory.low": "2"})
        },
    )


def test_a_conflict_names_field_and_owner_and_drops_the_answer() -> None:
    claims, clashes = merge(
        [("10-a", {"envs": {"A": "1"}}), ("20-b", {"cpus": CpuSet([1]), "envs": {"B": "2", "A": "1"}})]
    )
    assert "envs[A]" in clashes[1]
    assert "10-a" in clashes[1]
    assert claims.merged() == Adjustment(envs={"A": "1"})
    assert dict(claims.owners) == {"envs[A]": "10-a"}


def test_a_hook_without_answer_changes_nothing() -> None:
    assert FieldClaims().merged() is NOTHING


def test_a_change_of_the_merged_adjustment_has_no_effect() -> None:
    claims, _ = merge([("10-a", {"envs": {"A": "1"}})])
    merged_envs: Any = claims.merged().envs
    merged_envs["A"] = "mine"
    assert claims.merged().envs == {"A": "1"}


@given(st.lists(ANSWERS, max_size=6))
def test_there_is_a_conflict_exactly_if_a_field_has_an_owner(answers: list[AnswerFields]) -> None:
    claims, owners, accepted = FieldClaims(), dict[str, str](), []
    for number, reported in enumerate(answers):
        fields = set(field_names(reported))
        clash = claims.claim(str(number), reported)
        assert bool(clash) == bool(fields & owners.keys())
        if clash:
            assert any(f"{field}: hook {owners[field]} " in clash for field in fields & owners.keys())
        else:
            accepted.append(reported)
            owners |= dict.fromkeys(fields, str(number))
        assert dict(claims.owners) == owners
    # A refused answer leaves no change, and each reported field has exactly one owner.
    assert claims.merged() == merge([(str(i), reported) for i, reported in enumerate(accepted)])[0].merged()
    assert sorted(field_names(fields_set_by(claims.merged()))) == sorted(owners)


@given(st.lists(ANSWERS, max_size=5), st.randoms(use_true_random=False))
def test_merging_does_not_depend_on_the_order(answers: list[AnswerFields], random: Any) -> None:
    probe = FieldClaims()
    disjoint = [(str(i), reported) for i, reported in enumerate(answers) if not probe.claim(str(i), reported)]
    shuffled = list(disjoint)
    random.shuffle(shuffled)
    one, other = merge(disjoint)[0], merge(shuffled)[0]
    assert one.merged() == other.merged()
    assert one.owners == other.owners
