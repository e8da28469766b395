"""Decisions in sentences: complete texts of realistic records, and rules for every sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.cpu_topology import CpuTopology
from proxy.engine.node import Node
from proxy.engine.pod_dry_run import ArrivingPod, dry_run
from proxy.engine.state import NodeState
from proxy.model.explanation import (
    FOUND,
    AllocationStep,
    CpuHolder,
    Explanation,
    Fact,
    Merge,
    MovedContainer,
    ProviderAnswer,
    Shortfall,
)
from proxy.model.hint import TopologyHint
from proxy.model.idset import CpuSet, Mask
from proxy.model.options import Scope, TopologyPolicy
from proxy.model.workload import KubeQos, Pod, QosClass, Request, Verdict
from proxy.observe.explain_data import from_data, to_data
from proxy.observe.sentences import render_decision, sections
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy as replace

RECORDS = Path(__file__).with_name("records")
NODE = Mask((0,))
NAMES = sorted(path.stem for path in RECORDS.glob("*.json"))


def record(name: str) -> Explanation:
    return from_data(json.loads((RECORDS / f"{name}.json").read_text()))


def all_sentences(reported: Explanation) -> list[str]:
    return [text for section in sections(reported) for text in section.sentences]


def titles(reported: Explanation) -> list[str]:
    return [section.title for section in sections(reported)]


def section(reported: Explanation, title: str) -> tuple[str, ...]:
    return next(part.sentences for part in sections(reported) if part.title == title)


def hint(preferred: bool, *nodes: int) -> TopologyHint:
    return TopologyHint(Mask(nodes) if nodes else None, preferred)


def sentence_of(answer: ProviderAnswer) -> str:
    return sections(Explanation("e", "a/b", "u", answers=(answer,)))[1].sentences[0]


def check(text: str) -> None:
    assert text.isascii()
    assert text.isprintable()
    assert "  " not in text
    assert text == text.strip()
    assert re.search(r"[^ .:;,]\.$", text), text
    depth = 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_record_is_as_committed(name: str) -> None:
    assert render_decision(record(name), 100) == (RECORDS / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [20, 60, 200])
def test_width_breaks_lines_and_loses_no_word(name: str, width: int) -> None:
    reported = record(name)
    text = render_decision(reported, width)
    expected = " ".join(f"{s.title} {' '.join(s.sentences)}" for s in sections(reported)).split()
    assert text.split() == expected
    longest = max(map(len, expected))
    assert max(map(len, text.splitlines())) <= max(width, 40, longest + 6)


def test_the_order_is_that_of_the_decision() -> None:
    reported = record("owner")
    assert titles(reported) == [
        "",
        "Request",
        "Available",
        "Choice",
        "Allocated",
        "Result",
        "Moved",
        "Verdict",
    ]
    refused = titles(record("refused_single"))
    assert refused[-2:] == ["Verdict", "What would help"]
    assert "Result" not in refused


def test_a_refusal_begins_with_its_reason_and_ends_with_help() -> None:
    first, *_, last = sections(record("refused_single"))
    assert first.sentences == (
        "db/wide/postgres was rejected: Resources cannot be allocated with Topology locality.",
        "Reason: cpu does not fit on one NUMA node; it needs at least nodes 0-1 now.",
    )
    assert last.sentences == (
        "It would fit if node 1 had 4 more free CPUs (of 20 requested, 16 were free).",
        "The topology policy best-effort rejects no pod for alignment.",
        "Another node of the cluster may have room for it.",
    )


def without_reasons(name: str, *answer: ProviderAnswer) -> Explanation:
    """A refusal whose record has neither the obstacle nor a shortfall."""
    reported = record(name)
    assert reported.merge is not None
    return replace(
        reported,
        merge=replace(reported.merge, conflicts=()),
        answers=answer or reported.answers,
        shortfalls=(),
    )


def test_the_obstacle_is_read_from_the_hints_if_not_named() -> None:
    assert all_sentences(without_reasons("refused_single"))[1] == (
        "What it requests of cpu is not available on a single NUMA node."
    )
    apart = (
        ProviderAnswer("a", "x", "", (hint(True, 0), hint(True, 2)), 2, 2),
        ProviderAnswer("b", "y", "", (hint(True, 1),), 1, 1),
    )
    assert all_sentences(without_reasons("refused_single", *apart))[1] == (
        "Each resource has nodes that it prefers, but not the same: x on 0, 2; y on 1."
    )
    assert (
        len(
            sections(
                without_reasons("refused_single", ProviderAnswer("cpu", "cpu", "", (hint(True, 0),), 1, 1))
            )[0].sentences
        )
        == 1
    )
    assert all_sentences(
        without_reasons("refused_gpu", ProviderAnswer("a", "x", "", (hint(False, 0, 1),), 1, 0))
    )[1].startswith("What it requests of x is not available on as few NUMA nodes as its amount")


def test_the_headline_omits_details_of_other_sections() -> None:
    reported = replace(record("refused_gpu"), verdict=Verdict(9, "R", "R: text (ml/c/main)"))
    assert all_sentences(reported)[0] == "ml/c/main was rejected: text."
    reported = replace(reported, verdict=Verdict(9, "R", "more (ml/c/other) is unknown"))
    assert all_sentences(reported)[0] == "ml/c/main was rejected: more (ml/c/other) is unknown."


def test_an_aligned_but_refused_container_gets_no_alignment_advice() -> None:
    verdict = Verdict(9, "SMTAlignmentError", "not enough whole cores")
    text = render_decision(replace(record("owner"), verdict=verdict), 100)
    assert "chose node 1 (preferred)" in text
    assert "Each resource" not in text
    assert "best-effort" not in text
    assert "full-pcpus-only" in text


@pytest.mark.parametrize(
    ("lacks", "text"),
    [
        (
            (Shortfall("cpu", Mask((0,)), 20, 19), Shortfall("cpu", Mask((1,)), 20, 12)),
            "It would fit if node 0 had 1 more free CPU (of 20 requested, 19 were free).",
        ),
        (
            (
                Shortfall("cpu", NODE, 20, 19),
                Shortfall("x/gpu", NODE, 2, 0),
                Shortfall("cpu", Mask((1,)), 20, 2),
            ),
            "It would fit if node 1 had 18 more free CPUs (of 20 requested, 2 were free).",
        ),
        (
            (Shortfall("memory", Mask((0, 1)), 3 << 30, 1 << 30), Shortfall("x/gpu", Mask((0, 1)), 2, 0)),
            (
                "It would fit if nodes 0-1 had 2 GiB more of memory and 2 more of x/gpu"
                " (of 3 GiB requested, 1 GiB were free; of 2 requested, 0 were free)."
            ),
        ),
        (
            (Shortfall("hugepages-2Mi", None, 4 << 20, 2 << 20), Shortfall("cpu", None, 2, 2)),
            (
                "It would fit if the machine had 2 MiB more of hugepages-2Mi"
                " (of 4 MiB requested, 2 MiB were free)."
            ),
        ),
    ],
)
def test_the_shortage_is_reported_for_the_closest_nodes(lacks: tuple[Shortfall, ...], text: str) -> None:
    reported = replace(record("refused_single"), shortfalls=lacks)
    assert section(reported, "What would help")[0] == text


def test_without_facts_no_fit_is_reported() -> None:
    helped = section(replace(record("refused_gpu"), shortfalls=()), "What would help")
    assert not [text for text in helped if "fit if" in text]
    enough = replace(record("refused_gpu"), shortfalls=(Shortfall("cpu", None, 2, 2),))
    assert section(enough, "What would help") == helped


def test_an_impossible_resource_is_named_and_no_policy_is_advised() -> None:
    answer = (
        ProviderAnswer("devices", "x/gpu", "impossible"),
        ProviderAnswer("cpu", "cpu", "", (hint(True, 0),), 1, 1),
    )
    reported = without_reasons("refused_gpu", *answer)
    assert section(reported, "")[1:] == ("No NUMA nodes have what it requests of x/gpu.",)
    uncounted = without_reasons("refused_gpu", ProviderAnswer("devices", "x/gpu"), answer[1])
    assert all_sentences(uncounted)[1] == all_sentences(reported)[1]
    assert "best-effort" not in render_decision(uncounted)
    assert section(reported, "What would help")[0] == "Ask for less of x/gpu."
    assert "so that" not in render_decision(reported)
    assert "best-effort" not in render_decision(reported)


def test_a_resource_that_one_node_cannot_hold_is_named_although_it_is_preferred() -> None:
    reported = without_reasons("refused_single", ProviderAnswer("cpu", "cpu", "", (hint(True, 0, 1),), 1, 1))
    assert all_sentences(reported)[1] == "What it requests of cpu is not available on a single NUMA node."
    assert section(reported, "What would help")[0] == "Ask for less of cpu, so that one NUMA node has enough."


def test_a_refused_choice_is_not_described_as_taken() -> None:
    verdict = Verdict(9, "SharedPoolExhausted", "the shared pool would be left empty")
    reported = titles(replace(record("owner"), verdict=verdict))
    assert "Tried" in reported
    assert "Allocated" not in reported


def test_under_restricted_the_nodes_of_best_effort_are_named() -> None:
    answer = (ProviderAnswer("cpu", "cpu", "", (hint(False, 0, 1),), 1, 0),)
    merge = Merge("restricted", "container", hint(False, 0, 1), None, "no other nodes suit all resources")
    reported = replace(record("refused_gpu"), answers=answer, merge=merge)
    assert all_sentences(reported)[1].startswith(
        "What it requests of cpu is not available on as few NUMA nodes as its"
    )
    helped = " ".join(section(reported, "What would help"))
    assert "best-effort rejects no pod for alignment; it would have looked on nodes 0-1 first." in helped


@pytest.mark.parametrize(("name", "most"), [("be", 3), ("shared", 4)])
def test_simple_cases_are_short(name: str, most: int) -> None:
    assert len(render_decision(record(name), 100).splitlines()) <= most


def test_a_limit_equal_to_the_request_is_reported_with_it() -> None:
    facts = [Fact(f"cpu {kind}", "2", "x") for kind in ("request", "limit")]
    other = [Fact("memory request", "1", "x"), Fact("memory limit", "2", "x"), Fact("gpu limit", "1", "x")]
    reported = replace(record("owner"), facts=(*facts, *other))
    assert section(reported, "Request") == (
        "From x: cpu request and limit 2; memory request 1; memory limit 2; gpu limit 1.",
    )


def test_a_container_that_existed_already_was_adopted() -> None:
    found = replace(record("owner"), event=FOUND)
    assert all_sentences(found)[0] == all_sentences(record("owner"))[0].replace("admitted", "adopted")
    assert section(found, "Verdict") == ("The container existed already, so it was not rejected.",)


def test_a_refusal_without_details_has_general_advice() -> None:
    reported = Explanation("CreateContainer", "a/b", "", "c", verdict=Verdict(9))
    assert all_sentences(reported) == [
        "a/b/c was rejected: no reason is remembered.",
        "Rejected (gRPC status 9, FAILED_PRECONDITION).",
        "Ask for less, or for no whole CPUs, so that it shares CPUs with others.",
        "Another node of the cluster may have room for it.",
    ]


def test_a_status_code_of_another_version_is_shown_without_a_name() -> None:
    reported = Explanation("CreateContainer", "a/b", "", "c", verdict=Verdict(99))
    assert all_sentences(reported)[1] == "Rejected (gRPC status 99)."


@pytest.mark.parametrize(
    ("reason", "code", "begins", "elsewhere"),
    [
        ("InvalidCPUSet", 3, "Correct the annotation that the reason names", False),
        ("InvalidCPURequest", 3, "Let its containers together request a whole number of CPUs", False),
        ("RefusedByHook", 9, "If the named hook has rejected it, do as its message says", False),
        ("CPUsInUse", 9, "Wait until their owner has ended, or let the scheduler place the pod again", True),
    ],
)
def test_facts_of_a_pod_are_not_facts_of_the_node(
    reason: str, code: int, begins: str, elsewhere: bool
) -> None:
    reported = Explanation("CreateContainer", "a/b", "", "c", verdict=Verdict(code, reason, "no"))
    helped = section(reported, "What would help")
    assert helped[0].startswith(begins)
    assert ("Another node of the cluster may have room for it." in helped[1:]) == elsewhere
    assert len(helped) == 1 + elsewhere


def test_a_system_container_has_no_exclusive_cpus() -> None:
    reported = replace(record("shared"), pool="system", cpus=CpuSet([0, 1]))
    assert "was admitted to the SYSTEM pool (CPUs 0-1 then)" in all_sentences(reported)[0]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            ProviderAnswer(
                "cpu", "cpu", "", (hint(True, 0), hint(True, 1), hint(True, 2), hint(False, 0, 1)), 7, 3
            ),
            "cpu: preferred on node 0, node 1 or node 2; also possible on 4 sets of nodes, e.g. nodes 0-1.",
        ),
        (
            ProviderAnswer("cpu", "cpu", "", (hint(True, 0), hint(True, 1)), 2, 2),
            "cpu: preferred on node 0 or node 1.",
        ),
        (
            ProviderAnswer("cpu", "cpu", "", (hint(True, 0), hint(True, 1)), 9, 5),
            "cpu: preferred on 5 sets of nodes, e.g. node 0, node 1; also possible on 4 sets of nodes.",
        ),
        (
            ProviderAnswer("memory", "memory", "", (hint(False, 0, 2),), 1, 0),
            "memory: possible on nodes 0,2 only (not preferred).",
        ),
        (
            ProviderAnswer("memory", "memory", "", (hint(True),), 1, 1),
            "memory: possible on any node only (preferred).",
        ),
        (ProviderAnswer("devices", "", "no preference"), "devices: any nodes will do."),
        (ProviderAnswer("devices", "x.io/y", "impossible"), "x.io/y: no nodes can give it."),
        (ProviderAnswer("devices", "x.io/y"), "x.io/y: no nodes can give it."),
        (
            ProviderAnswer("cpu", "cpu", "", (hint(False, 0, 1),), None, None),
            "cpu: possible on too many sets of nodes to count, e.g. nodes 0-1.",
        ),
        (
            ProviderAnswer("cpu", "cpu", "", (), None, None),
            "cpu: possible on too many sets of nodes to count.",
        ),
        (
            ProviderAnswer("cpu", "cpu", "", (hint(True, 0), hint(False, 0, 1)), None, None),
            "cpu: possible on too many sets of nodes to count; preferred e.g. on node 0.",
        ),
        (ProviderAnswer("cpu", "cpu", "", (), 4, 0), "cpu: possible on 4 sets of nodes (not preferred)."),
    ],
)
def test_the_answer_of_a_provider_is_described(answer: ProviderAnswer, text: str) -> None:
    assert sentence_of(answer) == text


@pytest.mark.parametrize(
    ("merge", "texts"),
    [
        (Merge("none", "container", hint(False)), ["The topology policy is none: nodes are not weighed."]),
        (
            Merge("restricted", "pod", hint(True, 0), hint(True, 1), "lower node ids"),
            [
                "Policy restricted, for the pod, chose node 0 (preferred).",
                "It came before node 1 (preferred): lower node ids.",
            ],
        ),
        (
            Merge("best-effort", "container", hint(True), None, "no resource has a preference"),
            [
                "Policy best-effort, for the container, chose any node (preferred).",
                "What decided: no resource has a preference.",
            ],
        ),
        (
            Merge(
                "best-effort", "container", hint(False, 0, 2), None, "", ("cpu needs two nodes.", "gpu too")
            ),
            [
                "Policy best-effort, for the container, chose nodes 0,2 (not preferred).",
                "Reason: cpu needs two nodes; gpu too.",
            ],
        ),
    ],
)
def test_the_choice_of_a_policy_is_described(merge: Merge, texts: list[str]) -> None:
    assert list(section(Explanation("e", "a/b", "u", merge=merge), "Choice")) == texts


def test_a_long_list_of_moved_containers_is_cut() -> None:
    def moved(*containers: MovedContainer, more: int = 0) -> tuple[str, ...]:
        return section(Explanation("e", "a/b", "u", moved=containers, more_moved=more), "Moved")

    before, after = CpuSet.parse("0-7"), CpuSet.parse("0-3")
    (text,) = moved(*(MovedContainer(f"a/b{i}/c", before, after) for i in range(13)))
    assert text.startswith("13 containers left CPUs 4-7 and kept CPUs 0-3: a/b0/c, ")
    assert text.endswith("a/b9/c, and 3 more.")
    texts = moved(*(MovedContainer(f"a/b{i}/c", CpuSet((i, 90)), CpuSet((i,))) for i in range(13)))
    assert texts[0] == "a/b0/c left CPU 90 and kept CPU 0."
    assert len(texts) == 11
    assert texts[-1] == "And 3 more had to move."
    assert moved(MovedContainer("a/b/c", CpuSet((1,)), CpuSet((2,)))) == ("a/b/c left CPU 1 for CPU 2.",)
    assert moved(MovedContainer("a/b/c", before, after), more=4)[1:] == ("And 4 more had to move.",)


def test_steps_are_grouped_by_provider_and_cut() -> None:
    cores = [AllocationStep("cpu", f"core {i}: CPUs {i},{i + 32}") for i in range(12)]
    reported = Explanation("e", "a/b", "u", steps=(*cores, AllocationStep("memory", "node 0.")))
    texts = section(reported, "Allocated")
    assert texts[0].endswith("core 9: CPUs 9,41; and 2 more.")
    assert texts[1] == "memory: node 0."


def test_facts_are_grouped_by_source() -> None:
    reported = replace(record("owner"), facts=(Fact("a", "1", "x"), Fact("b", "2", ""), Fact("c", "3", "x")))
    assert sections(reported)[1].sentences == ("From x: a 1; c 3.", "Known: b 2.")


def test_control_characters_in_texts_are_removed() -> None:
    reported = replace(record("owner"), facts=(Fact("a", "\x1b[2J  b\nc\xe9", "x"),), reasons=("odd  one. ",))
    texts = all_sentences(reported)
    assert "From x: a ?[2J b c?." in texts
    assert "Odd one." in texts


TEXTS = st.text("abcXY019 -/=_,.;\n\t\xe9", max_size=20)
MASKS = st.none() | st.sets(st.integers(0, 9), min_size=1).map(Mask)
CPUS = st.sets(st.integers(0, 99)).map(CpuSet)
HINTS = st.builds(TopologyHint, MASKS, st.booleans())
EXPLANATIONS = st.builds(
    Explanation,
    st.just("CreateContainer"),
    st.just("ns/pod"),
    st.just("uid"),
    st.sampled_from(["", "c"]),
    st.integers(0, 3),
    facts=st.lists(st.builds(Fact, TEXTS, TEXTS, TEXTS), max_size=3).map(tuple),
    answers=st.lists(
        st.builds(
            ProviderAnswer,
            st.sampled_from(["cpu", "memory", "devices"]),
            TEXTS,
            st.sampled_from(["", "", "no preference", "impossible"]),
            st.lists(HINTS, max_size=4).map(tuple),
            st.none() | st.integers(0, 9),
            st.none() | st.integers(0, 9),
        ),
        max_size=3,
    ).map(tuple),
    merge=st.none()
    | st.builds(
        Merge,
        st.sampled_from(["none", "best-effort", "restricted", "single-numa-node"]),
        st.sampled_from(["pod", "container"]),
        HINTS,
        st.none() | HINTS,
        TEXTS,
        st.lists(TEXTS, max_size=2).map(tuple),
    ),
    steps=st.lists(st.builds(AllocationStep, st.sampled_from(["cpu", "memory"]), TEXTS), max_size=13).map(
        tuple
    ),
    verdict=st.builds(
        Verdict,
        st.sampled_from([0, 3, 9, 13]),
        st.sampled_from(["", "TopologyAffinityError", "SMTAlignmentError", "InvalidCPUSet"]),
        TEXTS,
    ),
    pool=st.sampled_from(["", "own", "shared", "be"]),
    cpus=CPUS,
    mems=MASKS,
    devices=st.lists(TEXTS, max_size=2).map(tuple),
    reasons=st.lists(TEXTS, max_size=2).map(tuple),
    moved=st.lists(st.builds(MovedContainer, TEXTS, CPUS, CPUS), max_size=14).map(tuple),
    shortfalls=st.lists(
        st.builds(
            Shortfall,
            st.sampled_from(["cpu", "memory", "x/y"]),
            MASKS,
            st.integers(0, 1 << 40),
            st.integers(0, 9),
        ),
        max_size=3,
    ).map(tuple),
)


@given(EXPLANATIONS)
def test_every_sentence_is_one(reported: Explanation) -> None:
    texts = all_sentences(reported)
    assert texts
    for text in texts:
        check(text)
    assert render_decision(reported, 80).isascii()


@pytest.mark.parametrize("name", NAMES)
def test_the_sentences_of_real_records(name: str) -> None:
    for text in all_sentences(record(name)):
        check(text)


MACHINE = regular_machine(2, 2, 4, 2)  # 4 NUMA nodes of 8 CPUs


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("policy", list(TopologyPolicy))
def test_every_record_of_the_engine_has_a_sentence(policy: TopologyPolicy, scope: Scope) -> None:
    node = Node(MACHINE, CpuTopology.of(MACHINE), static=True, policy=policy, scope=scope)
    state, reported = NodeState.empty(node), []
    for i, (count, qos) in enumerate(
        [(0, "LS"), (0, "BE"), (4, ""), (6, ""), (6, ""), (5, ""), (9, ""), (30, "")]
    ):
        request = Request(max(2, 1024 * count), 100_000 * count, 100_000)
        pod = Pod(f"s{i}", f"u{i}", "ns", f"p{i}", 0, QosClass(qos), KubeQos.GUARANTEED)
        outcome = dry_run(state, ArrivingPod(pod, request, (("main", request),)))
        state = outcome.state
        reported += outcome.explanations
    verdicts = {explanation.verdict.admitted for explanation in reported}
    assert verdicts == {True, False}
    for explanation in reported:
        assert from_data(json.loads(json.dumps(to_data(explanation)))) == explanation
        for text in all_sentences(explanation):
            check(text)


def test_devices_of_a_pod_are_described_as_those_of_its_containers() -> None:
    reported = replace(record("pod_scope"), devices=("x/gpu=g0",))
    given = f"Its containers were given CPUs {reported.cpus} and device x/gpu=g0 together."
    assert section(reported, "Result")[0] == given
    without = replace(reported, cpus=CpuSet())
    assert section(without, "Result")[0] == "Its containers were given device x/gpu=g0 together."


DONE = re.compile(
    r"\b(was|were) (admitted|rejected|given|put)\b|\b(left|kept) |\bhad to move|^Admitted|^Rejected"
)


@pytest.mark.parametrize("name", NAMES)
def test_a_decision_that_was_not_applied_is_in_the_conditional(name: str) -> None:
    reported = replace(record(name), applied=False)
    texts = all_sentences(reported)
    assert " would be " in texts[0]
    assert texts[1] == "The pod is only observed: nothing was changed."
    assert [text for text in texts if DONE.search(text)] == []
    assert {"Allocated", "Result", "Moved"}.isdisjoint(titles(reported))
    for text in texts:
        check(text)
    assert any(DONE.search(text) for text in all_sentences(replace(reported, applied=True)))


def test_an_observed_owner_is_in_the_conditional() -> None:
    reported = replace(record("owner"), applied=False)
    assert all_sentences(reported)[0].startswith(
        "ml/trainer/main would be admitted with CPUs 16-19,48-51 of its"
    )
    assert section(reported, "Result if applied")[:2] == (
        "It would be given CPUs 16-19,48-51, memory of node 1 and device nvidia.com/gpu=gpu2.",
        (
            "By the plan: Guaranteed container with 8 whole CPUs, policy static; "
            "picked 16-19,48-51 on NUMA node 1."
        ),
    )
    assert section(reported, "Would have to move")[0].startswith(
        "4 containers would leave CPUs 16-19,48-51 and keep CPUs 0,3-15,20-32,35-47,52-63: "
    )
    assert section(reported, "Verdict") == ("It would be admitted.",)


HELD = (CpuHolder("ml/a/main", CpuSet.parse("2-3")), CpuHolder("ml/b", CpuSet.parse("4")))


@pytest.mark.parametrize(
    ("lack", "text"),
    [
        (
            Shortfall("cpu", None, 12, 8, most=15, holders=HELD),
            (
                "It would fit if the machine had 4 more free CPUs (of 12 requested, 8 were free)."
                " CPUs are owned by ml/a/main (CPUs 2-3) and ml/b (CPU 4)."
            ),
        ),
        (
            Shortfall("cpu", None, 12, 12, kept=1, most=15, holders=HELD[1:], more_holders=2),
            (
                "It would fit if the machine had 1 more free CPU"
                " (of 12 requested, 12 were free, and 1 must stay in the shared pool)."
                " CPUs are owned by ml/b (CPU 4) and 2 more."
            ),
        ),
        (
            Shortfall("cpu", None, 16, 8, most=14, holders=HELD),
            "Ask for at most 14 CPUs: this machine has no more that can be owned.",
        ),
        (
            Shortfall("cpu", NODE, 12, 5, most=8, holders=HELD),
            "Ask for at most 8 CPUs: no NUMA node has more that can be owned.",
        ),
        (
            Shortfall("cpu", NODE, 6, 2, holders=HELD),
            (
                "It would fit if node 0 had 4 more free CPUs (of 6 requested, 2 were free)."
                " CPUs of node 0 are owned by ml/a/main (CPUs 2-3) and ml/b (CPU 4)."
            ),
        ),
        (
            Shortfall("cpu", None, 3, 1, named=CpuSet.parse("2-3"), holders=HELD[:1]),
            "It would fit if CPUs 2-3 were free. They are owned by ml/a/main (CPUs 2-3).",
        ),
    ],
)
def test_the_advice_has_numbers_and_names(lack: Shortfall, text: str) -> None:
    reported = Explanation(
        "CreateContainer",
        "ns/p",
        "u",
        "c",
        verdict=Verdict(9, "UnexpectedAdmissionError", "not enough cpus"),
        shortfalls=(lack,),
    )
    assert " ".join(section(reported, "What would help")).startswith(f"{text} Another node")


def test_more_on_the_machine_may_not_be_enough_if_nodes_are_aligned() -> None:
    lack = Shortfall("cpu", None, 12, 8, most=15, holders=HELD)
    reported = replace(record("refused_single"), shortfalls=(lack,))
    expected = "It needs at least 4 more free CPUs (of 12 requested, 8 were free)."
    assert section(reported, "What would help")[0] == expected
