"""Validation of a hook's answer at a point. Pure.

The whole answer is checked and copied into plain values before any of it is used: a hook may answer with its
own map types, which may return different values when they are read again. An invalid answer is refused with a
sentence that names the field; the caller adds the hook's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any, Final

from proxy.hooks.answers import CLEAR, FIELDS, LEAVE, MAPS, Adjustment, Update, Veto
from proxy.hooks.engine import values
from proxy.hooks.engine.claims import UPDATE_FIELDS, AnswerFields
from proxy.hooks.engine.errors import shown, subject
from proxy.hooks.engine.values import InvalidFieldError
from proxy.hooks.events import POINTS, Point
from proxy.model.errors import HookError
from proxy.model.idset import CpuSet, Mask

MOST_ENTRIES: Final = 256
"""Entries of one map."""
MOST_CHARACTERS: Final = 256 * 1024
"""Characters of all keys and values of one answer together."""
_TOO_FEW_TO_MEASURE: Final = 3
MOST_NAMED: Final = 3
"""The number of points that one sentence names."""
LONGEST_REASON: Final = 1024
"""Characters of a veto's reason; the rest is cut off."""

_all_fields_of = attrgetter(*FIELDS)
_MAP_FIELDS: Final = tuple(name for name in FIELDS if name in MAPS)
_maps_of = attrgetter(*_MAP_FIELDS)
_scalars_of = attrgetter(*(name for name in FIELDS if name not in MAPS))
_NO_SCALARS: Final = (LEAVE,) * (len(FIELDS) - len(_MAP_FIELDS))
_update_fields_of = attrgetter(*UPDATE_FIELDS)
_TEXT_MAPS: Final = frozenset(("unified", "annotations", "labels"))
_KEY_CHECKS: Final[Mapping[str, Callable[[object], str]]] = {
    "unified": values.cgroup_file,
    "annotations": values.key,
    "labels": values.key,
    "envs": values.variable,
    "devices": values.path,
    "mounts": values.path,
    "updates": values.key,
}


def checked_answer(answer: object, event: Point) -> AnswerFields | Veto | None:
    """Check an answer.

    Args:
        answer: The return value of the hook, of any type.
        event: The event that the hook received.

    Returns:
        The fields that it sets, as plain values; a veto with its reason; None if it sets nothing.

    Raises:
        HookError: The answer is invalid at this point.
    """
    if answer is None:
        return None
    if isinstance(answer, Adjustment):
        return _fields_of(answer, event)
    if not isinstance(answer, Veto):
        close = getattr(answer, "close", None) if type(answer).__name__ == "coroutine" else None
        if close is not None:
            close()  # it will never be awaited
        raise HookError(
            f"cannot use its answer at {event.NAME}: it must be an Adjustment"
            f"{', a Veto' if event.VETO else ''} or None, not {type(answer).__name__}"
        )
    return _veto(answer, event)


def _fields_of(answer: Adjustment, event: Point) -> AnswerFields | None:
    # Most answers only set entries of maps, so all other fields are compared at once.
    if all(map(is_, _scalars_of(answer), _NO_SCALARS)):
        fields = zip(_MAP_FIELDS, _maps_of(answer), strict=True)
    else:
        fields = zip(FIELDS, _all_fields_of(answer), strict=True)
    given: dict[str, Any] = {}
    entries = 0
    for field, value in fields:
        if value is LEAVE or (type(value) is dict and not value and field in MAPS):
            continue
        checked = _checked_map(field, value, event) if field in MAPS else _checked_scalar(field, value, event)
        if field not in MAPS:
            given[field] = checked
        elif checked:
            given[field] = checked
            entries += len(checked) if field != "updates" else MOST_ENTRIES
    if entries > _TOO_FEW_TO_MEASURE:
        _check_size(given, event)
    return given or None


def _veto(answer: Veto, event: Point) -> Veto:
    if not event.VETO:
        raise HookError(f"cannot refuse at {event.NAME}: it is too late there, or it cannot be refused")
    try:
        reason = values.text(answer.reason)
    except InvalidFieldError as wrong:
        raise HookError(f"cannot take the reason of its veto: {wrong}") from None
    return Veto(" ".join(reason.split())[:LONGEST_REASON] or "no reason given")


def _misplaced(field: str, value: Any, event: Point) -> HookError:
    """Return the error for a field that the event's point does not take."""
    takes = [name for name, point in POINTS.items() if field in point.TAKES]
    where = " and ".join(takes) if len(takes) <= MOST_NAMED else "other points"
    return HookError(
        _error_text(field, value, event, f"that cannot be changed at {event.NAME}, but at {where}")
    )


def _checked_scalar(field: str, value: Any, event: Point) -> Any:
    if field not in event.TAKES:
        raise _misplaced(field, value, event)
    if value is CLEAR:
        return value
    decision: Any = getattr(event, "decision", None)
    try:
        if field == "cpus":
            return values.ids(CpuSet, value, decision.allowed if decision is not None else None)
        if field == "mems":
            return values.ids(Mask, value, decision.allowed_mems if decision is not None else None)
        return values.parent(value) if field == "cgroup_parent" else values.number(field, value)
    except InvalidFieldError as wrong:
        raise HookError(_error_text(field, value, event, str(wrong))) from None


def _checked_map(field: str, value: Any, event: Point) -> dict[str, Any]:
    if field not in event.TAKES:
        raise _misplaced(field, value, event)
    if type(value) is not dict and not isinstance(value, Mapping):
        raise HookError(_error_text(field, value, event, f"it must be a mapping, not {type(value).__name__}"))
    items = list(islice(value.items(), MOST_ENTRIES + 1))
    if len(items) > MOST_ENTRIES:
        raise HookError(_error_text(field, None, event, f"at most {MOST_ENTRIES} entries are allowed"))
    plain: dict[str, Any] = {}
    check_key, kubelet_prefixes = _KEY_CHECKS[field], values.KUBELET_KEY_PREFIXES.get(field, ())
    for key, entry in items:
        try:
            name = check_key(key)
            if name in plain:
                raise InvalidFieldError("it is there twice, spelled in two ways")  # noqa: TRY301
            if name.startswith(kubelet_prefixes):
                _refuse_kubelet_key(field, name, entry, event)
            if entry is CLEAR and field != "updates":
                plain[name] = entry
            elif field in _TEXT_MAPS:
                plain[name] = values.text(entry)
            elif field == "updates":
                _add_update(plain, name, entry, event)
            else:
                plain[name] = _entry(field, name, entry)
        except InvalidFieldError as wrong:
            raise HookError(_error_text(f"{field}[{shown(key)}]", None, event, str(wrong))) from None
    return plain


def _refuse_kubelet_key(field: str, key: str, entry: object, event: Point) -> None:
    """Refuse a change of a label or an annotation by which kubelet recognizes its containers."""
    about: Any = event
    places = [getattr(about.container if hasattr(about, "container") else about.pod, field)]
    if field == "annotations" and hasattr(about, "asked_annotations"):
        places.append(about.asked_annotations)
    if not any(place.get(key) == entry for place in places):
        raise InvalidFieldError("kubelet has set it, and recognizes its pods and containers by it")


def _entry(field: str, key: str, entry: object) -> object:
    if field == "devices":
        return values.device(key, entry)
    if field == "mounts":
        return values.mount(key, entry)
    return values.text(entry, loose=True)


def _add_update(plain: dict[str, Any], key: str, entry: object, event: Point) -> None:
    if not isinstance(entry, Update):
        raise InvalidFieldError(f"it must be an Update, not {type(entry).__name__}")
    container: Any = getattr(event, "container", None)
    if "cpus" in event.TAKES and container is not None and container.id == key:
        raise InvalidFieldError("the call is about this container itself: set it in the adjustment")
    given: dict[str, Any] = {}
    for field, value in zip(UPDATE_FIELDS, _update_fields_of(entry), strict=True):
        if value is LEAVE:
            continue
        try:
            if field == "unified":
                if files := _files(value):
                    given[field] = MappingProxyType(files)  # other hooks receive this object
            elif value is CLEAR:
                given[field] = value
            else:
                given[field] = (
                    values.ids(CpuSet, value, None) if field == "cpus" else values.number(field, value)
                )
        except InvalidFieldError as wrong:
            raise InvalidFieldError(f"{field}: {wrong}") from None
    if given:
        plain[key] = Update(**given)


def _files(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InvalidFieldError(f"it must be a mapping, not {type(value).__name__}")
    items = list(islice(value.items(), MOST_ENTRIES + 1))
    if len(items) > MOST_ENTRIES:
        raise InvalidFieldError(f"at most {MOST_ENTRIES} entries are allowed")
    return {values.cgroup_file(key): values.text(entry) for key, entry in items}


def _check_size(given: AnswerFields, event: Point) -> None:
    total = sum(_size(entry) for field in MAPS.intersection(given) for entry in given[field].items())
    if total > MOST_CHARACTERS:
        raise HookError(
            f"cannot use its answer at {event.NAME}: it has {total} characters, "
            f"at most {MOST_CHARACTERS} are allowed"
        )


def _size(entry: tuple[str, Any]) -> int:
    key, value = entry
    if isinstance(value, str):
        return len(key) + len(value)
    if isinstance(value, Update):
        return len(key) + sum(map(_size, value.unified.items()))
    return 2 * len(key) + len(getattr(value, "host_path", ""))


def _error_text(field: str, value: object, event: Point, why: str) -> str:
    about = subject(event)
    verb = "clear" if value is CLEAR else "set"
    # Entries of maps are not shown: they may be secrets in environment variables.
    quiet = value is CLEAR or value is None or isinstance(value, Mapping)
    to = "" if quiet else f" to {shown(value)}"
    return f"cannot {verb} {field}{f' of {about}' if about else ''}{to}: {why}"
