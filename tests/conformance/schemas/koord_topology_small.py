"""The single rules that Koordinator's merge is made of."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.allocation.koordinator.hints import ScoredHint, gather, single_numa
from proxy.allocation.koordinator.scored_merge import Tenancy, admits, allowed
from proxy.model.koordinator import NumaExclusive
from proxy.model.options import TopologyPolicy
from tests.conformance import binding
from tests.conformance.cases import Case, Outcome, Topologies


def check(case: Case, _: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind not in _KINDS:
        return Outcome(skipped=f"kind {kind!r} is not built yet")
    return _KINDS[kind](case)


def _exclusive(case: Case) -> Outcome:
    hint = binding.hint(case.value("affinity", dict))
    tenancy = Tenancy(NumaExclusive(case.value("exclusive", str)), binding.status(case))
    return Outcome(case.value("expected", bool), allowed(hint.affinity, tenancy))


def _gathered(case: Case) -> Outcome:
    reported = gather([binding.answer(raw) for raw in case.optional("providers", list, [])])
    expected = [
        _plain([[binding.hint(h) for h in hints] for hints in case.optional("expected", list, [])]),
        case.optional("expected_reasons", list, []),
        case.optional("expected_summary", list, []),
    ]
    return Outcome(expected, [_plain(reported.lists), list(reported.reasons), list(reported.summary)])


def _single(case: Case) -> Outcome:
    lists = [[binding.hint(h) for h in hints or ()] for hints in case.value("lists", list)]
    expected = [[binding.hint(h) for h in hints or ()] for hints in case.optional("expected", list, [])]
    return Outcome(_plain(expected), _plain(single_numa(lists)))


def _admits(case: Case) -> Outcome:
    hint = binding.hint(case.value("hint", dict))
    return Outcome(case.value("expected", bool), admits(TopologyPolicy(case.value("policy", str)), hint))


def _plain(lists: Sequence[Sequence[ScoredHint]]) -> list[object]:
    return [[binding.plain(h) for h in hints] for hints in lists]


_KINDS = {
    "check_exclusive": _exclusive,
    "filter_providers": _gathered,
    "filter_single_numa": _single,
    "can_admit": _admits,
}
