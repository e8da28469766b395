from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Never

import pytest

from proxy.model.errors import InputError, PermissionDeniedError
from proxy.simulate.documents import SIZE_LIMIT, documents, found_files, read_bytes


def values(text: str | bytes, file: str = "f.yaml") -> list[object]:
    data = text.encode() if isinstance(text, str) else text
    return [document.value for document in documents(data, file)]


def refused(text: str | bytes, file: str = "f.yaml") -> str:
    with pytest.raises(InputError) as error:
        values(text, file)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


def test_plain_texts_are_read_as_kubernetes_reads_them() -> None:
    text = """
    exponent: 1e3
    octal: 010
    hex: 0x10
    sixty: 1:30
    date: 2020-01-01
    grouped: 1_000
    yes: yes
    text: '1'
    null: ~
    nothing:
    half: 0.5
    float: 1.5e+3
    sign: -7
    letter: y
    """
    assert values(text) == [
        {
            "exponent": "1e3",
            "octal": 8,
            "hex": 16,
            "sixty": "1:30",
            "date": "2020-01-01",
            "grouped": 1000,
            "yes": True,
            "text": "1",
            "null": None,
            "nothing": None,
            "half": 0.5,
            "float": 1500.0,
            "sign": -7,
            "letter": "y",
        }
    ]


def test_a_number_in_text_is_accepted() -> None:
    assert values("a: .inf\nb: -.inf") == [{"a": math.inf, "b": -math.inf}]


def test_numbers_too_long_for_an_integer_stay_text() -> None:
    assert values(f"a: {'9' * 5000}") == [{"a": "9" * 5000}]


def test_keys_are_texts_as_written() -> None:
    assert values("1: a\ntrue: b\n'x': c") == [{"1": "a", "true": "b", "x": "c"}]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_byte_order_mark_and_line_ends_make_no_difference(mark: bytes, end: bytes) -> None:
    assert values(mark + end.join([b"a: 1", b"b:", b"- x", b"---", b"c: 2"])) == [
        {"a": 1, "b": ["x"]},
        {"c": 2},
    ]


def test_empty_documents_are_left_out() -> None:
    assert values("---\n---\n# only words\n---\na: 1\n---\n") == [{"a": 1}]
    assert values("") == []
    assert values("# nothing") == []


def test_a_mapping_knows_its_line() -> None:
    document = documents(b"---\nkind: List\nitems:\n- a: 1\n-\n  b: 2\n", "f.yaml")[0]
    assert isinstance(document.value, dict)
    first, second = document.value["items"]
    assert document.where() == "f.yaml line 2"
    assert document.where(first) == "f.yaml line 4"
    assert document.where(second) == "f.yaml line 6"


def test_the_second_document_has_its_own_line() -> None:
    assert [d.line for d in documents(b"a: 1\n---\n\nb: 2\n--- {c: 3}\n", "f")] == [1, 4, 5]


def test_aliases_and_merges() -> None:
    text = "x: &x {a: 2, c: 3}\ny: {<<: *x, a: 1}\nz: {'<<': 1, <<: [*x, {a: 9, d: 4}]}\nw: *x\n"
    assert values(text) == [
        {
            "x": {"a": 2, "c": 3},
            "y": {"a": 1, "c": 3},
            "z": {"<<": 1, "a": 2, "c": 3, "d": 4},
            "w": {"a": 2, "c": 3},
        }
    ]


def test_a_few_lines_that_expand_to_billions_are_refused_at_once() -> None:
    laughs = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    laughs += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "f.yaml, line 7: more than 2000000 values" in refused("\n".join(laughs))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\n\tb: 2", "line 2: not YAML: "),
        ("a: b: c", "line 1: not YAML: mapping values"),
        ("a: 1\nb: \x01", "line 2: not YAML: "),
        ("a: 'x\n---\nb", "line 2: not YAML: "),
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' is there twice"),
        ("- &a [*a]", "line 1: the alias '*a' names nothing"),
        ("a: *b", "line 1: the alias '*b' names nothing"),
        ("---\na: &x 1\n---\nb: *x", "line 4: the alias '*x'"),
        ("a: !!python/object:os.system x", "line 1: the tag"),
        ("? [a]\n: b", "line 1: a key must be a text"),
        ("a: {<<: 1}", "line 1: << merges mappings only"),
        ("[" * 500, "line 1: nested deeper than"),
        ("a: !!int x\nb: @", "line 2: not YAML"),
        (b"a: 1\nb: \xff", "line 2: byte 8 is not UTF-8"),
        ("a: 1".encode("utf-16"), "line 1: byte 0 is not UTF-8"),
    ],
)
def test_one_line_with_the_line(text: str | bytes, expected: str) -> None:
    message = refused(text)
    assert message.startswith("cannot read f.yaml, ")
    assert expected in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": 2, "a": 1}', "the key 'a' is there twice"),
        ('{"a": NaN}', "NaN is not a JSON value"),
        ('{"a": 1', "not JSON: "),
        ("[" * 100_000, "cannot read f.json"),
        ('{"a": ' * 100_000, "cannot read f.json"),
    ],
)
def test_invalid_json_is_refused_with_the_cause(text: str, message: str) -> None:
    assert message in refused(text, "f.json")


def test_json_with_tabs_and_flow_yaml() -> None:
    assert values('{\n\t"a": 1.5,\n\t"b": "x"}', "f.json") == [{"a": 1.5, "b": "x"}]
    assert values("{a: 1}\n---\n[b]") == [{"a": 1}, ["b"]]


def test_a_file_can_be_too_large() -> None:
    assert "larger than" in refused(b" " * (SIZE_LIMIT + 1))


def test_a_file_without_permission_has_the_code_of_permissions(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, *_: object, **__: object) -> Never:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("proxy.open_file.os.open", denied)
    monkeypatch.setattr(Path, "stat", denied)
    for read in (lambda: read_bytes(Path("a")), lambda: found_files(["a"])):
        with pytest.raises(PermissionDeniedError, match=r"^cannot read a: Permission denied$"):
            read()
