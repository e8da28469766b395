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

from proxy.model.explanation import Explanation, Merge
from proxy.model.grpc_status import GrpcStatus
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet
from proxy.model.options import Policy
from proxy.observe.advice import against, help_for
from proxy.observe.provider_text import offer
from proxy.observe.value_text import begun, both, clean, cpus, few, nodes, sentence, sentences

MOVED_SHOWN = 10
CLASS = "QoS class"
_POOLS = {"shared": "the shared pool", "be": "the BE pool", "system": "the SYSTEM pool"}


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
        Section("What there was", tuple(offer(said) for said in told.said)),
        Section("What was chosen", _chosen(told)),
        Section("What was tried" if refused else "What was taken", _taken(told)),
        Section("Where that left it", _why(told) if refused else (*_placed(told), *_why(told))),
        Section("Who had to move", _moves(told)),
        Section("Verdict", _verdict(told)),
        Section("What would help", help_for(told) if refused else ()),
    ]
    return tuple(part for part in parts if part.sentences)


def headline(told: Explanation) -> str:
    """Give the answer in one sentence."""
    who = clean(told.ref) if told.container else f"Pod {clean(told.ref)}"
    if not told.verdict.admitted:
        return sentence(f"{who} was refused: {_message(told) or 'no reason is remembered'}")
    where, has = "", []
    if told.pool in _POOLS:
        where = f" to {_POOLS[told.pool]}{f' ({cpus(told.cpus)} then)' if told.cpus else ''}"
    elif told.cpus:
        has.append(f"{cpus(told.cpus)} {'of its own' if told.container else 'set aside for it'}")
    has += _beside(told)
    return sentence(f"{who} was admitted{where}{f' with {both(has)}' if has else ''}")


def _message(told: Explanation) -> str:
    """Give the message of a refusal, without what stands elsewhere in the text anyway."""
    reason, message = clean(told.verdict.reason), clean(told.verdict.operator_message)
    if reason and message.startswith(f"{reason}: "):
        message = message[len(reason) + 2 :]
    for name_of_it in (told.ref, *(f"{told.ref}: {'; '.join(told.merge.blame)}" if told.merge else "",)):
        message = message.removesuffix(f"({clean(name_of_it)})").rstrip()
    return message or reason


def _beside(told: Explanation) -> list[str]:
    """Name what it was given beside CPUs."""
    has = [] if told.mems is None else [f"memory of {nodes(told.mems)}"]
    if told.devices:
        named = few([clean(device) for device in told.devices])
        has.append(f"{'device' if len(told.devices) == 1 else 'devices'} {named}")
    return has


def _facts(told: Explanation) -> tuple[str, ...]:
    return sentences(
        f"{f'From {source}' if source else 'Known'}: {few(facts, 20, '; ')}"
        for source, facts in _by_source(told).items()
    )


def _known(told: Explanation) -> str:
    """Give the facts in one sentence; who is on the BE pool is there by class alone."""
    only = CLASS if told.pool == "be" else ""
    texts = [
        f"{', '.join(facts)}{f' from {source}' if source else ''}"
        for source, facts in _by_source(told, only).items()
    ]
    return f"Known: {'; '.join(texts)}" if texts else ""


def _by_source(told: Explanation, only: str = "") -> dict[str, list[str]]:
    """Give facts by where they are known from; a limit that equals the request is told with it."""
    values = {(f.source, f.what): f.value for f in told.facts}
    found: dict[str, list[str]] = {}
    for fact in told.facts:
        if only not in ("", fact.what):
            continue
        what, _, kind = fact.what.rpartition(" ")
        if kind == "limit" and values.get((fact.source, f"{what} request")) == fact.value:
            continue
        both_ways = kind == "request" and values.get((fact.source, f"{what} limit")) == fact.value
        text = f"{clean(fact.what)}{' and limit' if both_ways else ''} {clean(fact.value)}"
        found.setdefault(clean(fact.source), []).append(text.strip())
    return found


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
        took = told.verdict.admitted or merge.best.preferred
        first = f"{who} {'chose' if took else 'found at best'} {_hint(merge.best)}"
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
    beside = both(_beside(told))
    if told.pool in _POOLS:
        texts = [f"It shares {_POOLS[told.pool]}, which was {cpus(told.cpus)} then and may change"]
    elif told.cpus and told.container:
        texts = [f"It owns {cpus(told.cpus)}"]
    else:
        texts = [f"Its containers are given theirs out of {cpus(told.cpus)}"] if told.cpus else []
    if beside and told.container:
        texts = [f"{texts[0]}, and has {beside}" if texts else f"It has {beside}"]
    elif beside:
        texts = [f"{texts[0]}, beside {beside}" if texts else f"Its containers have {beside}"]
    return sentences(texts)


def _why(told: Explanation) -> tuple[str, ...]:
    return sentences(begun(clean(reason)) for reason in told.reasons)


def _moves(told: Explanation) -> tuple[str, ...]:
    """Say who left CPUs; those who went the same way are told together, and not all are named."""
    grouped: dict[tuple[CpuSet, CpuSet], list[str]] = {}
    for one in told.moved:
        grouped.setdefault((one.before, one.after), []).append(clean(one.ref))
    texts, named, counted = [], 0, 0
    for (before, after), refs in list(grouped.items())[:MOVED_SHOWN]:
        shown = refs[: MOVED_SHOWN - named]
        who = f"{len(refs)} containers" if len(refs) > 1 or not shown else shown[0]
        names = few(refs, len(shown)) if len(refs) > 1 and shown else ""
        texts.append(f"{who} {_way(before, after, len(refs))}{f': {names}' if names else ''}")
        named, counted = named + len(shown), counted + len(refs)
    rest = len(told.moved) - counted + told.more_moved
    if rest > 0:
        texts.append(f"And {rest} more had to move")
    return sentences(texts)


def _way(before: CpuSet, after: CpuSet, count: int) -> str:
    verb = "keeps" if count == 1 else "keep"
    return f"left {cpus(before - after)} {f'and {verb}' if after <= before else 'for'} {cpus(after)}"


def _verdict(told: Explanation) -> tuple[str, ...]:
    verdict = told.verdict
    if verdict.admitted:
        return ("Admitted.",)
    code = f"gRPC status {verdict.code}, {GrpcStatus(verdict.code).name}"
    return sentences([f"Refused{f' with {verdict.reason}' if verdict.reason else ''} ({code})"])
