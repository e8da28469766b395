"""The sections of admission and of enforcement.

The section of admission configures which pods may own CPUs, and how many. The section of enforcement
configures to which pods the plan is applied, and how fast running pods are changed. Both select pods by
namespaces and label selectors, which are kinds of settings here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from msgspec.structs import replace

from proxy.config.kinds import BOOLEAN, SettingKind, choice, duration, text_schema, whole_number
from proxy.config.nested_values import YamlNode, suggestion
from proxy.config.setting import key
from proxy.model.admission import AdmissionRules, BeyondLimit, Namespaces, ResourceStatusMode
from proxy.model.label_selector import LONGEST_VALUE, LabelExpression, LabelOperator, LabelSelector
from proxy.model.pod_selection import PodSelection

AUTO = "auto"
MOST_CPUS = 65_536
_PATTERN = re.compile(r"[a-z0-9*?](?:[a-z0-9*?-]{0,61}[a-z0-9*?])?")
_MOST_PATTERNS = 1000
_NUMBER_TAGS = frozenset({"str", "int"})

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
                text = value.text("an operator", _WORDS)
                if text not in list(LabelOperator):
                    raise value.fault(
                        f"{text!r} is not {', '.join(LabelOperator)}{suggestion(text, LabelOperator)}"
                    )
                operator = LabelOperator(text)
            case "values":
                values = tuple(dict.fromkeys(map(_value, value.members("a list of values"))))
            case _:
                raise value.fault(f"unknown key{suggestion(name, _FIELDS)}")
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
            labels = {
                _key(label, value_tree): _value(value_tree)
                for label, value_tree in value.entries("labels with values")
            }
        elif name == "matchExpressions":
            for value_tree in value.members("a list of expressions"):
                expressions.append(_expression(value_tree))
                if len(expressions) > _MOST:
                    raise value_tree.fault(f"there are more than {_MOST} expressions")
        else:
            raise value.fault(f"unknown key{suggestion(name, _PARTS)}")
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
                "key": expression.key,
                "operator": expression.operator.value,
                **({"values": list(expression.values)} if expression.values else {}),
            }
            for expression in selector.match_expressions
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


def _read_count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"{text!r} is not a whole number")
    if (count := int(text)) > MOST_CPUS:
        raise ValueError(f"{count} is not between 0 and {MOST_CPUS}")
    return count


LIMIT = SettingKind(
    f"a whole number, 0 to {MOST_CPUS}, or empty",
    lambda text: _read_count(text.strip()) if text.strip() else None,
    lambda count: "" if count is None else str(count),
    _NUMBER_TAGS,
    schema={"anyOf": [{"type": "integer", "minimum": 0, "maximum": MOST_CPUS}, text_schema("([0-9]{1,9})?")]},
)
FLOOR = SettingKind(
    f"{AUTO}, or a whole number, 0 to {MOST_CPUS}",
    lambda text: None if text == AUTO else _read_count(text),
    lambda count: AUTO if count is None else str(count),
    _NUMBER_TAGS,
    shows_wants=True,
    schema={
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": MOST_CPUS},
            {"type": "string", "pattern": f"^({AUTO}|[0-9]{{1,9}})$"},
        ]
    },
)


def _read_namespaces(tree: YamlNode) -> Namespaces:
    patterns: dict[str, None] = {}
    for entry in tree.members("a list of namespaces"):
        name = entry.text("the name of a namespace, or a pattern such as team-*", _NUMBER_TAGS)
        if not _PATTERN.fullmatch(name):
            raise entry.fault(f"{name[:80]!r} is not a name of a namespace, and no pattern such as team-*")
        patterns[name] = None
        if len(patterns) > _MOST_PATTERNS:
            raise entry.fault(f"there are more than {_MOST_PATTERNS} namespaces")
    return Namespaces(tuple(patterns))


NAMESPACES = SettingKind(
    "a list of namespaces or patterns: * matches any characters, ? one character",
    _read_namespaces,
    lambda namespaces: list(namespaces.patterns),
    frozenset({"seq"}),
    shows_wants=True,
    schema={
        "type": "array",
        "items": {
            "anyOf": [
                {"type": "string", "pattern": f"^{_PATTERN.pattern}$"},
                {"type": "integer", "minimum": 0},
            ]
        },
    },
)


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Which pods may own CPUs, and how many. None means no limit, or for a floor the default share."""

    resource_status: ResourceStatusMode = field(
        default=ResourceStatusMode.BOUNDED,
        metadata=key(
            "resourceStatus",
            choice(ResourceStatusMode),
            "The annotation resource-status, by which a scheduler names the CPUs of a pod. bounded: no more "
            "CPUs than the pod requests, and no reserved ones. follow: any CPUs. ignore: it is not read.",
            live=True,
        ),
    )
    namespaces: Namespaces = field(
        default=Namespaces(("*",)),
        metadata=key(
            "namespaces",
            NAMESPACES,
            "Namespaces whose pods may use resource-status and the classes LSE and LSR.",
            live=True,
        ),
    )
    namespace_selector: LabelSelector = field(
        default=LabelSelector(),
        metadata=key(
            "namespaceSelector",
            SELECTOR,
            "Labels that these namespaces must also have; needs clusterFacts.directory. A namespace whose "
            "labels are not known is not permitted. Empty: all labels.",
            live=True,
        ),
    )
    system_namespaces: Namespaces = field(
        default=Namespaces(("kube-system",)),
        metadata=key(
            "systemNamespaces",
            NAMESPACES,
            "Namespaces whose pods may use class SYSTEM on a node that reserves CPUs for it.",
            live=True,
        ),
    )
    pod_limit: int | None = field(
        default=None,
        metadata=key("maxCPUsPerPod", LIMIT, "Most CPUs that one pod may own. Empty: no limit.", live=True),
    )
    namespace_limit: int | None = field(
        default=None,
        metadata=key(
            "maxCPUsPerNamespace",
            LIMIT,
            "Most CPUs of this node that the pods of one namespace may own together. Empty: no limit.",
            live=True,
        ),
    )
    node_limit: int | None = field(
        default=None,
        metadata=key(
            "maxCPUsPerNode", LIMIT, "Most CPUs of this node that may be owned. Empty: no limit.", live=True
        ),
    )
    floor: int | None = field(
        default=None,
        metadata=key(
            "sharedFloor",
            FLOOR,
            "CPUs of the shared pool that no owner may take. auto: one core with its threads or 5 % of the "
            "CPUs, whichever is more, and at most half of them.",
            live=True,
        ),
    )
    numa_floor: int | None = field(
        default=None,
        metadata=key("sharedFloorPerNUMANode", FLOOR, "The same on each NUMA node.", live=True),
    )
    beyond: BeyondLimit = field(
        default=BeyondLimit.REJECT,
        metadata=key(
            "beyondLimit",
            choice(BeyondLimit),
            "What happens to a pod that claims more than it may: it is rejected with the name of the rule, "
            "or it shares CPUs as an ordinary pod.",
            live=True,
        ),
    )
    name_others: bool = field(
        default=False,
        metadata=key(
            "nameOthers",
            BOOLEAN,
            "Rejections, which the events of a pod show, name the other pods that have the CPUs. The log "
            "and topoproxy explain name them in any case.",
            live=True,
        ),
    )

    @property
    def rules(self) -> AdmissionRules:
        """The section, converted to the rules of a node."""
        return AdmissionRules(
            self.resource_status,
            replace(self.namespaces, selector=self.namespace_selector),
            self.system_namespaces,
            self.pod_limit,
            self.namespace_limit,
            self.node_limit,
            self.floor,
            self.numa_floor,
            self.beyond,
            self.name_others,
        )


@dataclass(frozen=True, slots=True)
class EnforceConfig:
    """To which pods mode enforce applies the plan. All other pods are observed."""

    namespaces: Namespaces = field(
        default=Namespaces(("*",)),
        metadata=key("namespaces", NAMESPACES, "Namespaces whose pods the plan is applied to.", live=True),
    )
    pod_selector: LabelSelector = field(
        default=LabelSelector(),
        metadata=key(
            "podSelector",
            SELECTOR,
            "Labels of the pods that the plan is applied to; empty: all pods.",
            live=True,
        ),
    )
    percent: int = field(
        default=100,
        metadata=key(
            "percent",
            whole_number(0, 100),
            "How many of these pods the plan is applied to. The hash of a pod's UID decides, so a larger "
            "percentage only adds pods.",
            live=True,
        ),
    )
    pods_per_step: int = field(
        default=1,
        metadata=key(
            "podsPerStep",
            whole_number(1, 1000),
            "How many running pods are changed together when mode or enforce change on a running node.",
            live=True,
        ),
    )
    step_period: float = field(
        default=1.0,
        metadata=key(
            "stepPeriod", duration(0.1, 3600), "Time between the beginnings of two such steps.", live=True
        ),
    )

    @property
    def selection(self) -> PodSelection:
        """The section, converted to a selection of pods."""
        return PodSelection(self.namespaces, self.pod_selector, self.percent)
