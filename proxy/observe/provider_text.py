"""What providers could offer, in sentences: on how many sets of nodes, and which of these are preferred.

Of long lists a record keeps only some hints, the preferred ones first; then they are shown as examples.
"""

from __future__ import annotations

from proxy.model.explanation import ProviderAnswer
from proxy.observe.advice import name
from proxy.observe.value_text import few, node_set, sentence


def offer(answer: ProviderAnswer) -> str:
    """Say what a provider offered for a resource."""
    if answer.nothing == "no preference":
        return sentence(f"{name(answer)}: any nodes will do")
    if answer.nothing or answer.count == 0:
        return sentence(f"{name(answer)}: no nodes can give it")
    liked = [node_set(hint.affinity) for hint in answer.hints if hint.preferred]
    others = [node_set(hint.affinity) for hint in answer.hints if not hint.preferred]
    if answer.count is None or answer.preferred is None:
        some = (
            f"; preferred ones are e.g. {few(liked)}" if liked else f", e.g. {few(others)}" if others else ""
        )
        return sentence(f"{name(answer)}: too many node sets to count{some}")
    if answer.count == 1:
        which = "".join([*liked, *others][:1])
        only = f"the only node set is {which}, and" if which else "there is one node set, and"
        return sentence(f"{name(answer)}: {only} it is {'' if answer.preferred else 'not '}preferred")
    rest = answer.count - answer.preferred
    if not answer.preferred:
        return sentence(f"{name(answer)}: none of {answer.count} node sets is preferred{_some(others, rest)}")
    share = f"all {answer.count}" if not rest else f"{answer.preferred} of {answer.count}"
    verb = "is" if answer.preferred == 1 else "are"
    beside = f"; {'the other' if rest == 1 else 'others'}{_some(others, rest)}" if rest and others else ""
    return sentence(
        f"{name(answer)}: {share} node sets {verb} preferred{_some(liked, answer.preferred)}{beside}"
    )


def _some(shown: list[str], count: int) -> str:
    """List node sets: all of them, or as examples."""
    if not shown:
        return ""
    return f"{':' if len(shown) >= count else ', e.g.'} {', '.join(shown)}"
