"""``topoproxy explain`` against a daemon's admin socket; docs/explain.md shows what it prints."""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from msgspec import structs

from proxy.cli.explain import explain
from proxy.executor.decision_history import DecisionHistory
from proxy.model.errors import InputError, TopoproxyError, UnavailableError, UsageError
from proxy.observe.explain_data import from_data, history_page

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "tests" / "observe" / "records"
DOCUMENT = ROOT / "docs" / "explain.md"
BEGIN = 1795164800
# The records, their time (seconds after BEGIN) and the ids of their containers.
DAY = (
    ("be", 0, "3f0c8d7a91b2e4d5"),
    ("observed", 20, "e4da3b7fbbce2345"),
    ("shared", 35, "9b1de02c44f8a6c7"),
    ("pod_scope", 61, "c81e728d9d4c2f63"),
    ("pod_part", 62, "eccbc87e4b5ce2fe"),
    ("owner", 312, "a87ff679a2f3e71d"),
    ("refused_single", 420, ""),
    ("refused_gpu", 431, ""),
    ("refused_cpus", 440, ""),
    ("refused_single", 480, ""),
)


def record(name: str):
    return from_data(json.loads((RECORDS / f"{name}.json").read_text()))


@pytest.fixture
def history() -> DecisionHistory:
    history = DecisionHistory()
    for name, second, key in DAY:
        history.note(BEGIN + second, record(name), key)
    return history


@pytest.fixture
def daemon(serve_admin, history: DecisionHistory, monkeypatch: pytest.MonkeyPatch):
    """A daemon's admin socket in a thread; returns the configuration file that names it."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield serve_admin({"/explain": lambda params: history_page(history, params)})
    monkeypatch.undo()
    time.tzset()


def run(*args: object) -> str:
    result = CliRunner().invoke(explain, [str(w) for w in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_newest_decision_of_each_container_is_printed(daemon: Path) -> None:
    page = run("ml/pair", "--config", daemon)
    assert page.startswith(
        "[2026-11-20 08:54:21, RunPodSandbox, sandbox c81e728d9d4c2]\nPod ml/pair was admitted"
    )
    assert "\n\n[2026-11-20 08:54:22, CreateContainer, container eccbc87e4b5ce]\nml/pair/right was" in page
    assert "older" not in page


def test_older_decisions_are_counted_and_printed_with_all(daemon: Path) -> None:
    page = run("wide", "--config", daemon)
    assert page.count("was rejected") == 1
    assert "[2026-11-20 09:01:20, CreateContainer]" in page
    assert page.endswith("\n1 older decision is remembered; --all shows it.\n")
    everything = run("wide", "--all", "--config", daemon)
    assert everything.count("was rejected") == 2
    assert "[2026-11-20 09:00:20, CreateContainer]" in everything
    assert "older" not in everything


def test_a_container_is_selected_by_name_or_by_id(daemon: Path) -> None:
    assert run("ml/trainer/main", "--config", daemon) == run("containerd://a87ff679a2f3", "--config", daemon)


def test_without_a_pod_the_known_pods_are_listed(daemon: Path) -> None:
    lines = run("--config", daemon).splitlines()
    assert [line.split()[2] for line in lines[1:-2]] == [
        "batch/scan",
        "shop/cart",
        "shop/web-0",
        "ml/pair",
        "ml/trainer",
        "ml/c",
        "batch/huge",
        "db/wide",
    ]
    assert lines[-3].endswith("REJECTED: TopologyAffinityError")
    assert "REFUSED" not in lines[-6]
    assert lines[-1] == "topoproxy explain POD[/CONTAINER] shows why."


def test_all_pods_are_listed(daemon: Path, history: DecisionHistory) -> None:
    history.limit = 1000
    owner = record("owner")
    for at in range(600):
        pod = structs.replace(owner, pod=f"prod/job-{at}", uid=f"job-{at}")
        history.note(BEGIN + 1000 + at, pod, f"{at:016x}")
    page = run("--config", daemon)
    assert " batch/scan " in page
    assert " prod/job-599 " in page


def test_the_decisions_can_be_printed_as_json(daemon: Path) -> None:
    data = json.loads(run("trainer", "--json", "--config", daemon))
    assert list(data) == ["schema", "query", "records", "pods", "remembered"]
    assert (data["schema"], data["query"], data["pods"]) == ("topoproxy-explain/1", "trainer", [])
    (entry,) = data["records"]
    assert from_data(entry["decision"]) == record("owner")
    assert (entry["when"], entry["id"], entry["there"]) == (BEGIN + 312, "a87ff679a2f3e71d", True)
    assert len(json.loads(run("wide", "--json", "--config", daemon))["records"]) == 1
    assert len(json.loads(run("wide", "--json", "--all", "--config", daemon))["records"]) == 2
    listed = json.loads(run("--json", "--config", daemon))
    assert [pod["pod"] for pod in listed["pods"]][-1] == "db/wide"
    assert listed["records"] == []


def test_a_pod_without_decisions_is_an_error(daemon: Path) -> None:
    message = r"cannot explain ml/trianer: there is no decision for it \(did you mean ml/trainer\?\); "
    with pytest.raises(
        TopoproxyError, match=message + "10 decisions are remembered, topoproxy explain lists"
    ) as caught:
        run("ml/trianer", "--config", daemon)
    assert caught.value.exit_code == 1
    with pytest.raises(TopoproxyError, match="there is no decision for it; 10 decisions"):
        run("zzzzzzzzzzzz", "--json", "--config", daemon)
    with pytest.raises(TopoproxyError, match=r"did you mean db/wide/postgres\?"):
        run("db/wide/postgre", "--config", daemon)
    with pytest.raises(TopoproxyError, match=r"did you mean trainer or pair\?"):
        run("trainr", "--config", daemon)


def test_an_empty_history_is_an_error(daemon: Path, history: DecisionHistory) -> None:
    history.limit = 0
    for _, _, key in DAY:
        history.removed(key)
    assert run("--config", daemon).startswith("No decision is remembered")
    with pytest.raises(TopoproxyError, match="there is no decision for it, nor is any other remembered"):
        run("x", "--config", daemon)


def test_a_name_that_is_too_long_is_refused(daemon: Path) -> None:
    with pytest.raises(InputError, match="longer than 1024 bytes"):
        run("x" * 2000, "--config", daemon)


def test_a_named_socket_needs_no_configuration(daemon: Path) -> None:
    daemon.write_text("broken: [")
    socket = daemon.with_name("admin.sock")
    assert "ml/trainer/main was admitted" in run("trainer", "--admin", f"unix://{socket}", "--config", daemon)


def test_a_missing_daemon_is_an_error(tmp_path: Path) -> None:
    message = (
        r"no process listens there \(systemctl status topoproxy shows whether it runs, --admin names another"
    )
    with pytest.raises(UnavailableError, match=message) as caught:
        run("x", "--admin", tmp_path / "no.sock")
    assert caught.value.exit_code == 69
    with pytest.raises(UsageError, match="cannot use --admin: 'tcp://x'"):
        run("--admin", "tcp://x")


def test_a_name_that_is_not_text_is_answered_in_one_line(daemon: Path) -> None:
    with pytest.raises(TopoproxyError) as caught:
        run("\udcff\n\x1b[31mred", "--config", daemon)
    assert str(caught.value).startswith("cannot explain ? ?[31mred: there is no decision for it")


def test_the_output_is_ascii(daemon: Path) -> None:
    assert run("--all", "ml/pair", "--config", daemon).isascii()


# -- docs and help ------------------------------------------------------------------------------------------


def examples() -> list[tuple[str, str]]:
    """Return the commands of the document, each with the output that the document has for it."""
    blocks = re.findall(r"```console\n\$ topoproxy explain ?(.*)\n((?:.*\n)*?)```\n", DOCUMENT.read_text())
    return [(args, expected) for args, expected in blocks]


def test_the_document_shows_what_the_command_prints(daemon: Path) -> None:
    assert len(examples()) >= 5
    for args, expected in examples():
        try:
            printed = run(*shlex.split(args), "--config", daemon)
        except TopoproxyError as error:
            printed = f"topoproxy: {error}\n"
        assert expected == printed, args


def test_the_document_names_every_field() -> None:
    text = DOCUMENT.read_text()

    def fields(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(fields, value.values()))
        return set().union(*map(fields, value)) if isinstance(value, list) else set()

    recorded = set().union(*(fields(json.loads(path.read_text())) for path in RECORDS.glob("*.json")))
    missing = {
        name for name in recorded | {"when", "id", "there", "wanted", "free"} if f"`{name}`" not in text
    }
    assert not missing


def test_the_help_has_the_output_of_the_command(daemon: Path) -> None:
    expected = explain.get_help(click.Context(explain, info_name="explain"))
    printed = run("shop/web-0", "--config", daemon)
    for line in printed.splitlines():
        assert f"    {line}\n" in expected
