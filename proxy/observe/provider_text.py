"""What providers could offer, in sentences: on how many sets of nodes, and which of these are preferred.

Of long lists a record keeps only some hints, the preferred ones first; then they are shown as examples.
"""

from __future__ import annotations

from proxy.model.explanation import ProviderAnswer
from proxy.observe.advice import name
from proxy.observe.value_text import few, node_set, sentence


def offer(said: ProviderAnswer) -> str:
    """Say what a provider offered for a resource."""
    if said.nothing == "no preference":
        return sentence(f"{name(said)}: any nodes will do")
    if said.nothing or said.count == 0:
        return sentence(f"{name(said)}: no nodes can give it")
    liked = [node_set(hint.affinity) for hint in said.hints if hint.preferred]
    others = [node_set(hint.affinity) for hint in said.hints if not hint.preferred]
    if said.count is None or said.preferred is None:
        some = (
            f"; preferred ones are e.g. {few(liked)}" if liked else f", e.g. {few(others)}" if others else ""
        )
        return sentence(f"{name(said)}: too many node sets to count{some}")
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
