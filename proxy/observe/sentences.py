"""Writes a decision in plain English: the answer to "why these CPUs?" and "why was it rejected?".

The answer itself is the first line. The rest is in the order of the decision: what was requested and the
source of each fact, what each provider could offer, what the policy chose and why, what the allocators took,
what the container got, what had to move, the verdict. If there was no choice, the whole text has two or three
lines. A rejection begins with its reason and ends with what would help.

A plan that was not applied (the pod was only observed) is written with "would". A plan that was applied is in
the past tense: it may have changed since.

Everything is ASCII; every sentence ends with a period.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from msgspec import Struct

from proxy.model.explanation import FOUND, Explanation, Merge, ProviderAnswer
from proxy.model.grpc_status import GrpcStatus
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet
from proxy.model.options import TopologyPolicy
from proxy.observe.advice import causes_against, help_for, resource_name
from proxy.observe.value_text import (
    capitalized,
    clean,
    cpus,
    join_first,
    join_with_and,
    nodes,
    sentence,
    sentences,
)

MOVED_SHOWN = 10
QOS_CLASS_FACT = "QoS class"
_POOLS = {"shared": "the shared pool", "be": "the BE pool", "system": "the SYSTEM pool"}


class Section(Struct, frozen=True):
    """Sentences under a title; the first section has none."""

    title: str
    sentences: tuple[str, ...]


def render_decision(record: Explanation, width: int = 100) -> str:
    """Write a decision in sentences.

    Args:
        record: The record.
        width: Columns of the terminal.

    Returns:
        Lines, the last one with its line end.
    """
    lines: list[str] = []
    for section in sections(record):
        if section.title:
            lines.append(f"  {section.title}")
        indent = "    " if section.title else ""
        for text in section.sentences:
            lines += wrap(text, width, indent)
    return "\n".join(lines) + "\n"


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Break a text into lines; lines after the first are indented by two more."""
    return textwrap.wrap(
        text,
        max(width, 40),
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def sections(record: Explanation) -> tuple[Section, ...]:
    """Return the sentences of a decision, section by section; sections without any are left out."""
    if record.verdict.admitted and not (record.answers or record.merge or record.steps or record.moved):
        return (
            Section("", sentences((headline(record), *_observed(record), *_why(record), _known(record)))),
        )
    rejected, applied = not record.verdict.admitted, record.applied
    verb = "Allocated" if applied else "Would be allocated"
    parts = [
        Section("", (headline(record), *_observed(record), *(causes_against(record) if rejected else ()))),
        Section("Request", _facts(record)),
        Section("Available", tuple(offer(answer) for answer in record.answers)),
        Section("Choice", _chosen(record)),
        Section("Tried" if rejected else verb, _taken(record)),
        Section(
            "Result" if applied else "Result if applied",
            _why(record) if rejected else (*_placed(record), *_why(record)),
        ),
        Section("Moved" if applied else "Would have to move", _moves(record)),
        Section("Verdict", _verdict(record)),
        Section("What would help", help_for(record) if rejected else ()),
    ]
    return tuple(part for part in parts if part.sentences)


def headline(record: Explanation) -> str:
    """Return the answer in one sentence."""
    subject = clean(record.ref) if record.container else f"Pod {clean(record.ref)}"
    if not record.verdict.admitted:
        return sentence(f"{subject} {_was(record)} rejected: {_message(record) or 'no reason is remembered'}")
    where, parts = "", []
    if record.pool in _POOLS:
        when = "then" if record.applied else "by the plan"
        where = f" to {_POOLS[record.pool]}{f' ({cpus(record.cpus)} {when})' if record.cpus else ''}"
    elif record.cpus:
        parts.append(f"{cpus(record.cpus)} {'of its own' if record.container else 'set aside for it'}")
    parts += _besides_cpus(record)
    done = "adopted" if record.event == FOUND else "admitted"
    return sentence(
        f"{subject} {_was(record)} {done}{where}{f' with {join_with_and(parts)}' if parts else ''}"
    )


def _was(record: Explanation) -> str:
    return "was" if record.applied else "would be"


def _observed(record: Explanation) -> tuple[str, ...]:
    """Return the sentence that nothing was changed, if the pod was only observed."""
    return () if record.applied else ("The pod is only observed: nothing was changed.",)


def _message(record: Explanation) -> str:
    """Return the message of a rejection, without the parts that are elsewhere in the text."""
    reason, message = clean(record.verdict.reason), clean(record.verdict.operator_message)
    if reason and message.startswith(f"{reason}: "):
        message = message[len(reason) + 2 :]
    for name_of_it in (
        record.ref,
        *(f"{record.ref}: {'; '.join(record.merge.conflicts)}" if record.merge else "",),
    ):
        message = message.removesuffix(f"({clean(name_of_it)})").rstrip()
    return message or reason


def _besides_cpus(record: Explanation) -> list[str]:
    """Return the resources other than CPUs that the container was given."""
    parts = [] if record.mems is None else [f"memory of {nodes(record.mems)}"]
    if record.devices:
        named = join_first([clean(device) for device in record.devices])
        parts.append(f"{'device' if len(record.devices) == 1 else 'devices'} {named}")
    return parts


def _facts(record: Explanation) -> tuple[str, ...]:
    return sentences(
        f"{f'From {source}' if source else 'Known'}: {join_first(facts, 20, '; ')}"
        for source, facts in _by_source(record).items()
    )


def _known(record: Explanation) -> str:
    """Return the facts in one sentence; a container is in the BE (best effort) pool by its class alone."""
    only = QOS_CLASS_FACT if record.pool == "be" else ""
    texts = [
        f"{', '.join(facts)}{f' from {source}' if source else ''}"
        for source, facts in _by_source(record, only).items()
    ]
    return f"Known: {'; '.join(texts)}" if texts else ""


def _by_source(record: Explanation, only: str = "") -> dict[str, list[str]]:
    """Return facts by their source; a limit that equals the request is shown with it."""
    values = {(f.source, f.what): f.value for f in record.facts}
    texts: dict[str, list[str]] = {}
    for fact in record.facts:
        if only not in ("", fact.what):
            continue
        name, _, kind = fact.what.rpartition(" ")
        if kind == "limit" and values.get((fact.source, f"{name} request")) == fact.value:
            continue
        both_ways = kind == "request" and values.get((fact.source, f"{name} limit")) == fact.value
        text = f"{clean(fact.what)}{' and limit' if both_ways else ''} {clean(fact.value)}"
        texts.setdefault(clean(fact.source), []).append(text.strip())
    return texts


# -- what was chosen --------------------------------------------------------------------------------------


def _chosen(record: Explanation) -> tuple[str, ...]:
    merge = record.merge
    if merge is None:
        return ()
    if merge.policy == TopologyPolicy.NONE:
        return (sentence(f"The topology policy is {merge.policy}: nodes are not weighed"),)
    policy = f"Policy {clean(merge.policy)}, for the {clean(merge.scope) or 'container'},"
    if merge.best.affinity is None and not merge.best.preferred:
        first = f"{policy} found no NUMA nodes that suit all resources"
    else:
        took = record.verdict.admitted or merge.best.preferred
        first = f"{policy} {'chose' if took else 'found at best'} {_hint(merge.best)}"
    texts = sentences([first, _deciding(merge)])
    return (*texts, *causes_against(record)) if record.verdict.admitted else texts


def _deciding(merge: Merge) -> str:
    decided = clean(merge.decided)
    if merge.runner_up is None:
        return f"What decided: {decided}" if decided else ""
    return f"It came before {_hint(merge.runner_up)}{f': {decided}' if decided else ''}"


def _hint(hint: TopologyHint) -> str:
    return f"{nodes(hint.affinity)} ({'' if hint.preferred else 'not '}preferred)"


def _taken(record: Explanation) -> tuple[str, ...]:
    by_provider: dict[str, list[str]] = {}
    for step in record.steps:
        by_provider.setdefault(clean(step.provider), []).append(clean(step.what).rstrip("."))
    return sentences(f"{provider}: {join_first(steps, gap='; ')}" for provider, steps in by_provider.items())


# -- the result -------------------------------------------------------------------------------------------


def _placed(record: Explanation) -> tuple[str, ...]:
    besides = _besides_cpus(record)
    if record.pool in _POOLS:
        pool = f"{_POOLS[record.pool]}, which was {cpus(record.cpus)} then and may change"
        return sentences(
            [f"It {_was(record)} put on {pool}{f', with {join_with_and(besides)}' if besides else ''}"]
        )
    resources = join_with_and([*([cpus(record.cpus)] if record.cpus else []), *besides])
    if not resources:
        return ()
    if record.container:
        return sentences([f"It {_was(record)} given {resources}"])
    return sentences(
        [f"Its containers {'were' if record.applied else 'would be'} given {resources} together"]
    )


def _why(record: Explanation) -> tuple[str, ...]:
    by = "" if record.applied else "by the plan: "
    return sentences(capitalized(f"{by}{clean(reason)}") for reason in record.reasons)


def _moves(record: Explanation) -> tuple[str, ...]:
    """Return sentences about the containers that left CPUs; equal moves share one, and not all are named."""
    grouped: dict[tuple[CpuSet, CpuSet], list[str]] = {}
    for move in record.moved:
        grouped.setdefault((move.before, move.after), []).append(clean(move.ref))
    texts, named, counted = [], 0, 0
    for (before, after), refs in list(grouped.items())[:MOVED_SHOWN]:
        shown = refs[: MOVED_SHOWN - named]
        movers = f"{len(refs)} containers" if len(refs) > 1 or not shown else shown[0]
        names = join_first(refs, len(shown)) if len(refs) > 1 and shown else ""
        way = _move_text(before, after, applied=record.applied)
        texts.append(f"{movers} {way}{f': {names}' if names else ''}")
        named, counted = named + len(shown), counted + len(refs)
    unnamed = len(record.moved) - counted + record.more_moved
    if unnamed > 0:
        texts.append(f"And {unnamed} more {'had' if record.applied else 'would have'} to move")
    return sentences(texts)


def _move_text(before: CpuSet, after: CpuSet, *, applied: bool) -> str:
    left, kept = ("left", "kept") if applied else ("would leave", "keep")
    return f"{left} {cpus(before - after)} {f'and {kept}' if after <= before else 'for'} {cpus(after)}"


def _verdict(record: Explanation) -> tuple[str, ...]:
    verdict = record.verdict
    if verdict.admitted:
        if record.event == FOUND:
            return ("The container existed already, so it was not rejected.",)
        return ("Admitted." if record.applied else "It would be admitted.",)
    name = next((f", {status.name}" for status in GrpcStatus if status == verdict.code), "")
    code = f"gRPC status {verdict.code}{name}"
    rejected = "Rejected" if record.applied else "It would be rejected"
    return sentences([f"{rejected}{f' with {verdict.reason}' if verdict.reason else ''} ({code})"])


# Of a long list a record keeps only some hints, the preferred ones first; they are shown as examples.


def offer(answer: ProviderAnswer) -> str:
    """Return the offer of a provider for a resource, as text."""
    return sentence(f"{resource_name(answer)}: {_offered(answer)}")


def _offered(answer: ProviderAnswer) -> str:
    if answer.nothing == "no preference":
        return "any nodes will do"
    if answer.nothing or answer.count == 0:
        return "no nodes can give it"
    liked = [nodes(hint.affinity) for hint in answer.hints if hint.preferred]
    not_preferred = [nodes(hint.affinity) for hint in answer.hints if not hint.preferred]
    if answer.count is None or answer.preferred is None:
        examples = (
            f"; preferred e.g. on {join_first(liked)}"
            if liked
            else f", e.g. {join_first(not_preferred)}"
            if not_preferred
            else ""
        )
        return f"possible on too many sets of nodes to count{examples}"
    if answer.count == 1:
        which = "".join([*liked, *not_preferred][:1]) or "one set of nodes"
        return f"possible on {which} only ({'' if answer.preferred else 'not '}preferred)"
    not_listed = max(0, answer.count - answer.preferred)
    parts = [f"preferred on {_places(liked, answer.preferred)}"] if answer.preferred else []
    if not_listed:
        remark = "" if answer.preferred else " (not preferred)"
        parts.append(f"{'also ' if parts else ''}possible on {_places(not_preferred, not_listed)}{remark}")
    return "; ".join(parts)


def _places(shown: Sequence[str], count: int) -> str:
    """List sets of nodes: all of them, or some as examples."""
    if shown and len(shown) >= count:
        return f"{', '.join(shown[:-1])} or {shown[-1]}" if len(shown) > 1 else shown[0]
    return f"{count} sets of nodes{f', e.g. {join_first(shown)}' if shown else ''}"
