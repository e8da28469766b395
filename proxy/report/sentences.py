"""A decision told in plain English, for whoever asks "why these CPUs?" or "why was it refused?".

The order is that of the decision: what was asked for and from where each fact is known, what each provider
could offer, what the policy chose and what decided, what the allocators took, where that left the container,
who had to move, the verdict. The answer itself is the first line. Where nothing was weighed, two or three
lines are all there is. A refusal begins with its reason and ends with what would help.

Everything is ASCII; every sentence ends with a period.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from proxy.model.explanation import Explanation, Merge, Moved, Said
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet
from proxy.model.options import Policy
from proxy.report.advice import against, help_for, name
from proxy.report.words import begun, both, clean, cpus, few, node_set, nodes, sentence, sentences

MOVED_SHOWN = 10
_CODES = {3: "INVALID_ARGUMENT", 9: "FAILED_PRECONDITION"}
_POOLS = {"shared": "the shared pool", "be": "the BE pool"}


@dataclass(frozen=True, slots=True)
class Section:
    """Sentences under a title; the first section has none."""

    title: str
    sentences: tuple[str, ...]


def tell(told: Explanation, width: int = 100) -> str:
    """Tell a decision.

    Args:
        told: The record.
        width: Columns of the terminal.

    Returns:
        Lines, the last one with its line end.
    """
    lines: list[str] = []
    for section in sections(told):
        if section.title:
            lines.append(f"  {section.title}")
        indent = "    " if section.title else ""
        for text in section.sentences:
            lines += wrap(text, width, indent)
    return "\n".join(lines) + "\n"


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Break a text into lines; what follows the first is indented by two more."""
    return textwrap.wrap(
        text,
        max(width, 40),
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def sections(told: Explanation) -> tuple[Section, ...]:
    """Give the sentences of a decision, section by section; sections without any are left out."""
    if told.verdict.admitted and not (told.said or told.merge or told.steps or told.moved):
        return (Section("", sentences((headline(told), *_why(told), _known(told)))),)
    refused = not told.verdict.admitted
    parts = [
        Section("", (headline(told), *(against(told) if refused else ()))),
        Section("What was asked for", _facts(told)),
        Section("What there was", tuple(_offer(said) for said in told.said)),
        Section("What was chosen", _chosen(told)),
        Section("What was taken", _taken(told)),
        Section("Where that left it", _why(told) if refused else (*_placed(told), *_why(told))),
        Section("Who had to move", _moves(told.moved)),
        Section("Verdict", _verdict(told)),
        Section("What would help", help_for(told) if refused else ()),
    ]
    return tuple(part for part in parts if part.sentences)


def headline(told: Explanation) -> str:
    """Give the answer in one sentence."""
    who = clean(told.ref) if told.container else f"Pod {clean(told.ref)}"
    if not told.verdict.admitted:
        why = clean(told.verdict.message) or clean(told.verdict.reason) or "no reason is remembered"
        return sentence(f"{who} was refused: {why}")
    where, has = "", []
    if told.pool in _POOLS:
        where = f" to {_POOLS[told.pool]}{f' ({cpus(told.cpus)} then)' if told.cpus else ''}"
    elif told.cpus:
        has.append(f"{cpus(told.cpus)} {'of its own' if told.container else 'set aside for it'}")
    if told.mems is not None:
        has.append(f"memory of {nodes(told.mems)}")
    if told.devices:
        has.append(f"{'device' if len(told.devices) == 1 else 'devices'} {_devices(told)}")
    return sentence(f"{who} was admitted{where}{f' with {both(has)}' if has else ''}")


def _devices(told: Explanation) -> str:
    return few([clean(device) for device in told.devices])


def _facts(told: Explanation) -> tuple[str, ...]:
    return sentences(
        f"{f'From {source}' if source else 'Known'}: {few(facts, 20, '; ')}"
        for source, facts in _by_source(told).items()
    )


def _known(told: Explanation) -> str:
    """Give the facts in one sentence."""
    texts = [f"{', '.join(f)}{f' from {source}' if source else ''}" for source, f in _by_source(told).items()]
    return sentence(f"Known: {'; '.join(texts)}") if texts else ""


def _by_source(told: Explanation) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for fact in told.facts:
        found.setdefault(clean(fact.source), []).append(f"{clean(fact.what)} {clean(fact.value)}".strip())
    return found


# -- what there was ---------------------------------------------------------------------------------------


def _offer(said: Said) -> str:
    """Say what a provider offered for a resource."""
    if said.nothing == "no preference":
        return sentence(f"{name(said)}: any nodes will do")
    if said.nothing or said.count == 0:
        return sentence(f"{name(said)}: no nodes can give it")
    liked = [node_set(hint.affinity) for hint in said.hints if hint.preferred]
    others = [node_set(hint.affinity) for hint in said.hints if not hint.preferred]
    if said.count is None or said.preferred is None:
        first = f"too many node sets to count; preferred ones are e.g. {few(liked)}" if liked else ""
        return sentence(f"{name(said)}: {first or f'too many node sets to count, e.g. {few(others)}'}")
    if said.count == 1:
        which = "".join([*liked, *others][:1])
        only = f"the only node set is {which}, and" if which else "there is one node set, and"
        return sentence(f"{name(said)}: {only} it is {'' if said.preferred else 'not '}preferred")
    rest = said.count - said.preferred
    if not said.preferred:
        return sentence(f"{name(said)}: none of {said.count} node sets is preferred{_some(others, rest)}")
    share = f"all {said.count}" if not rest else f"{said.preferred} of {said.count}"
    verb = "is" if said.preferred == 1 else "are"
    beside = f"; {'the other' if rest == 1 else 'others'}{_some(others, rest)}" if rest and others else ""
    return sentence(f"{name(said)}: {share} node sets {verb} preferred{_some(liked, said.preferred)}{beside}")


def _some(shown: list[str], count: int) -> str:
    """List node sets: all of them, or as examples."""
    if not shown:
        return ""
    return f"{':' if len(shown) >= count else ', e.g.'} {', '.join(shown)}"


# -- what was chosen --------------------------------------------------------------------------------------


def _chosen(told: Explanation) -> tuple[str, ...]:
    merge = told.merge
    if merge is None:
        return ()
    if merge.policy == Policy.NONE:
        return (sentence(f"The topology policy is {merge.policy}: nodes are not weighed"),)
    who = f"Policy {clean(merge.policy)}, for the {clean(merge.scope) or 'container'},"
    if merge.best.affinity is None and not merge.best.preferred:
        first = f"{who} found no nodes that do for all resources"
    else:
        first = f"{who} {'chose' if told.verdict.admitted else 'found at best'} {_hint(merge.best)}"
    texts = sentences([first, _deciding(merge)])
    return (*texts, *against(told)) if told.verdict.admitted else texts


def _deciding(merge: Merge) -> str:
    decided = clean(merge.decided)
    if merge.runner_up is None:
        return f"What decided: {decided}" if decided else ""
    return f"It came before {_hint(merge.runner_up)}{f': {decided}' if decided else ''}"


def _hint(hint: TopologyHint) -> str:
    return f"{nodes(hint.affinity)} ({'' if hint.preferred else 'not '}preferred)"


def _taken(told: Explanation) -> tuple[str, ...]:
    by_provider: dict[str, list[str]] = {}
    for step in told.steps:
        by_provider.setdefault(clean(step.provider), []).append(clean(step.what).rstrip("."))
    return sentences(f"{provider}: {few(steps, gap='; ')}" for provider, steps in by_provider.items())


# -- what came of it --------------------------------------------------------------------------------------


def _placed(told: Explanation) -> tuple[str, ...]:
    texts = []
    if told.pool in _POOLS:
        texts.append(f"It shares {_POOLS[told.pool]}, which was {cpus(told.cpus)} then and may change")
    elif told.cpus and told.container:
        texts.append(f"It runs on {cpus(told.cpus)}, which no other owner is given")
    elif told.cpus:
        texts.append(f"Its containers are given theirs out of {cpus(told.cpus)}")
    if told.mems is not None:
        texts.append(f"Its memory comes from {nodes(told.mems)}")
    if told.devices:
        texts.append(f"It has {_devices(told)}")
    return sentences(texts)


def _why(told: Explanation) -> tuple[str, ...]:
    return sentences(begun(clean(reason)) for reason in told.reasons)


def _moves(moved: tuple[Moved, ...]) -> tuple[str, ...]:
    """Say who left CPUs; those who went the same way are told together, and not all are named."""
    grouped: dict[tuple[CpuSet, CpuSet], list[str]] = {}
    for one in moved:
        grouped.setdefault((one.before, one.after), []).append(clean(one.ref))
    texts, named, counted = [], 0, 0
    for (before, after), refs in list(grouped.items())[:MOVED_SHOWN]:
        shown = refs[: MOVED_SHOWN - named]
        who = f"{len(refs)} containers" if len(refs) > 1 or not shown else shown[0]
        names = few(refs, len(shown)) if len(refs) > 1 and shown else ""
        texts.append(f"{who} {_way(before, after, len(refs))}{f': {names}' if names else ''}")
        named, counted = named + len(shown), counted + len(refs)
    if len(moved) > counted:
        texts.append(f"And {len(moved) - counted} more had to move")
    return sentences(texts)


def _way(before: CpuSet, after: CpuSet, count: int) -> str:
    verb = "keeps" if count == 1 else "keep"
    return f"left {cpus(before - after)} {f'and {verb}' if after <= before else 'for'} {cpus(after)}"


def _verdict(told: Explanation) -> tuple[str, ...]:
    verdict = told.verdict
    if verdict.admitted:
        return ("Admitted.",)
    status = _CODES.get(verdict.code, "")
    code = f"gRPC status {verdict.code}{f', {status}' if status else ''}"
    return sentences([f"Refused{f' with {verdict.reason}' if verdict.reason else ''} ({code})"])
