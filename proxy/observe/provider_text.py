"""What providers could offer, in sentences: on which NUMA nodes, and which of these are preferred.

Of long lists a record keeps only some hints, the preferred ones first; then they are shown as examples.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.model.explanation import ProviderAnswer
from proxy.observe.advice import name
from proxy.observe.value_text import few, nodes, sentence


def offer(answer: ProviderAnswer) -> str:
    """Say what a provider offered for a resource."""
    return sentence(f"{name(answer)}: {_offered(answer)}")


def _offered(answer: ProviderAnswer) -> str:
    if answer.nothing == "no preference":
        return "any nodes will do"
    if answer.nothing or answer.count == 0:
        return "no nodes can give it"
    liked = [nodes(hint.affinity) for hint in answer.hints if hint.preferred]
    others = [nodes(hint.affinity) for hint in answer.hints if not hint.preferred]
    if answer.count is None or answer.preferred is None:
        some = f"; preferred e.g. on {few(liked)}" if liked else f", e.g. {few(others)}" if others else ""
        return f"possible on too many sets of nodes to count{some}"
    if answer.count == 1:
        which = "".join([*liked, *others][:1]) or "one set of nodes"
        return f"possible on {which} only ({'' if answer.preferred else 'not '}preferred)"
    rest = max(0, answer.count - answer.preferred)
    parts = [f"preferred on {_places(liked, answer.preferred)}"] if answer.preferred else []
    if rest:
        remark = "" if answer.preferred else " (not preferred)"
        parts.append(f"{'also ' if parts else ''}possible on {_places(others, rest)}{remark}")
    return "; ".join(parts)


def _places(shown: Sequence[str], count: int) -> str:
    """List sets of nodes: all of them, or as examples."""
    if shown and len(shown) >= count:
        return f"{', '.join(shown[:-1])} or {shown[-1]}" if len(shown) > 1 else shown[0]
    return f"{count} sets of nodes{f', e.g. {few(shown)}' if shown else ''}"
