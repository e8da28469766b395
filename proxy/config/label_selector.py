"""The kind of settings that are label selectors, as Kubernetes writes them."""

from __future__ import annotations

import re

from proxy.config.kinds import SettingKind
from proxy.config.nested_values import YamlNode, meant
from proxy.model.label_selector import LONGEST_VALUE, LabelExpression, LabelOperator, LabelSelector

_WORD = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_PREFIX = re.compile(r"(?=.{1,253}/)[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/")
_WORDS = frozenset({"str", "int", "float", "bool"})
_MOST = 100
_LABEL_VALUE = {"type": ["string", "number", "boolean"], "maxLength": LONGEST_VALUE}
_PARTS = ("matchLabels", "matchExpressions")
_FIELDS = ("key", "operator", "values")


def _key(text: str, tree: YamlNode) -> str:
    prefix = _PREFIX.match(text)
    if not _WORD.fullmatch(text, prefix.end() if prefix else 0):
        raise tree.fault(f"{text[:80]!r} is not a key of a label such as app or example.com/tier")
    return text


def _value(tree: YamlNode) -> str:
    text = tree.text("a value of a label", _WORDS)
    if text and not _WORD.fullmatch(text):
        raise tree.fault(f"{text[:80]!r} is not a value of a label (at most {LONGEST_VALUE} characters)")
    return text


def _expression(tree: YamlNode) -> LabelExpression:
    label = operator = None
    values: tuple[str, ...] = ()
    for name, value in tree.entries("key, operator and values"):
        match name:
            case "key":
                label = _key(value.text("a key of a label", _WORDS), value)
            case "operator":
                word = value.text("an operator", _WORDS)
                if word not in list(LabelOperator):
                    raise value.fault(
                        f"{word!r} is not {', '.join(LabelOperator)}{meant(word, LabelOperator)}"
                    )
                operator = LabelOperator(word)
            case "values":
                values = tuple(dict.fromkeys(map(_value, value.members("a list of values"))))
            case _:
                raise value.fault(f"unknown key{meant(name, _FIELDS)}")
    if label is None or operator is None:
        raise tree.fault(f"{'key' if label is None else 'operator'} is missing")
    if (operator in (LabelOperator.IN, LabelOperator.NOT_IN)) is not bool(values):
        raise tree.fault(f"{operator} {'takes no values' if values else 'needs values'}")
    return LabelExpression(label, operator, values)


def _read_selector(tree: YamlNode) -> LabelSelector:
    labels: dict[str, str] = {}
    expressions: list[LabelExpression] = []
    for name, value in tree.entries("matchLabels and matchExpressions"):
        if name == "matchLabels":
            labels = {_key(label, each): _value(each) for label, each in value.entries("labels with values")}
        elif name == "matchExpressions":
            for each in value.members("a list of expressions"):
                expressions.append(_expression(each))
                if len(expressions) > _MOST:
                    raise each.fault(f"there are more than {_MOST} expressions")
        else:
            raise value.fault(f"unknown key{meant(name, _PARTS)}")
    if len(labels) > _MOST:
        raise tree.fault(f"there are more than {_MOST} labels")
    return LabelSelector(tuple(sorted(labels.items())), tuple(expressions))


def _show_selector(selector: LabelSelector) -> dict[str, object]:
    shown: dict[str, object] = {}
    if selector.match_labels:
        shown["matchLabels"] = dict(selector.match_labels)
    if selector.match_expressions:
        shown["matchExpressions"] = [
            {
                "key": each.key,
                "operator": each.operator.value,
                **({"values": list(each.values)} if each.values else {}),
            }
            for each in selector.match_expressions
        ]
    return shown


SELECTOR = SettingKind(
    "matchLabels and matchExpressions, as in Kubernetes",
    _read_selector,
    _show_selector,
    frozenset({"map"}),
    schema={
        "type": "object",
        "properties": {
            "matchLabels": {"type": "object", "additionalProperties": _LABEL_VALUE},
            "matchExpressions": {
                "type": "array",
                "maxItems": _MOST,
                "items": {
                    "type": "object",
                    "properties": {
                        "key": {"type": "string"},
                        "operator": {"enum": [each.value for each in LabelOperator]},
                        "values": {"type": "array", "items": _LABEL_VALUE},
                    },
                    "required": ["key", "operator"],
                    "additionalProperties": False,
                },
            },
        },
        "additionalProperties": False,
    },
)
