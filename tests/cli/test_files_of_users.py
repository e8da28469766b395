"""Invalid files of users: a one-line error, and the exit code for bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.cli.main import command_line

CONTENTS = {
    "text": b"hello\n",
    "list": b"- 1\n- a\n",
    "number": b"42",
    "empty": b"",
    "binary": b"\xe2\x28\xa1\x00\xff",
    "nested": b"[" * 50_000 + b"]" * 50_000,
    "repeated": b'{"a": 1, "a": 2}',
}
HOOK = str(Path(__file__).parents[2] / "hooks/20-quota-off.py")
READ = "cannot read {file}"
NO_NODES = "cannot simulate a cluster without nodes"
EXPECTED: dict[tuple[str, ...], tuple[int, dict[str, str]]] = {
    ("simulate", "--cluster"): (
        65,
        {
            "text": f"{READ}, line 1: the document is text, not an object",
            "list": f"{READ}, line 1: the document is a list, not an object",
            "number": f"{READ}, line 1: the document is the value '42', not an object",
            "empty": NO_NODES,
            "binary": f"{READ}, line 1: byte 0 is not UTF-8",
            "nested": f"{READ}: it is nested too deeply",
            "repeated": f"{READ}: the key 'a' is there twice",
        },
    ),
    ("simulate",): (
        65,
        {
            "text": f"{READ}, line 1: the document is text, not an object",
            "list": f"{READ}, line 1: the document is a list, not an object",
            "empty": "cannot simulate pods: no pods found in ",
            "nested": f"{READ}: it is nested too deeply",
        },
    ),
    ("topology", "--machine"): (
        65,
        {
            "text": "cannot read the machine description {file}: not JSON",
            "number": "cannot read the machine description {file}: the description must be a JSON object",
            "empty": "cannot read the machine description {file}: not JSON",
            "binary": "cannot read the machine description {file}: byte 0 is not UTF-8",
            "nested": "cannot read the machine description {file}: it is nested too deeply",
            "repeated": "cannot read the machine description {file}: the key 'a' is there twice",
        },
    ),
    ("hooks", "run", HOOK, "--event"): (
        65,
        {
            "text": "cannot use the event {file}: it is not JSON",
            "empty": "cannot use the event {file}: it is not JSON",
            "binary": "cannot use the event {file}: byte 0 is not UTF-8",
            "nested": "cannot use the event {file}: it is nested too deeply",
        },
    ),
    ("upgrade", "--check", "--from"): (
        65,
        {
            "text": f"{READ}: not JSON",
            "number": "cannot use {file}: it is not what topoproxy upgrade --describe prints",
            "empty": f"{READ}: not JSON",
            "binary": f"{READ}: byte 0 is not UTF-8",
            "nested": f"{READ}: it is nested too deeply",
        },
    ),
    ("check-config", "--config"): (
        78,
        {
            "text": "cannot use the configuration {file}: line 1: must be keys with values",
            "list": "cannot use the configuration {file}: line 1: must be keys with values",
            "binary": "cannot use the configuration {file}: byte 0 is not UTF-8",
            "nested": "cannot use the configuration {file}: it is nested too deeply",
        },
    ),
}


@pytest.mark.parametrize(
    ("command", "content"),
    [(command, content) for command, (_, expected) in EXPECTED.items() for content in expected],
    ids=lambda part: part if isinstance(part, str) else " ".join(Path(item).name for item in part),
)
def test_garbage_is_refused_in_one_line(
    command: tuple[str, ...], content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "garbage"
    file.write_bytes(CONTENTS[content])
    code, expected = EXPECTED[command]
    assert command_line([*command, str(file)]) == code
    errors = capsys.readouterr().err
    assert errors.startswith(f"topoproxy: {expected[content].format(file=file)}"), errors
    assert errors.count("\n") == 1
