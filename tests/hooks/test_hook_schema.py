"""The settings of a hook."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config.frozen_mapping import FrozenMapping
from proxy.hooks.loader.schema import keys_of, settings_of
from proxy.model.errors import HookError

WHERE = "hooks.settings.10-x.config"


class Level(enum.StrEnum):
    LOW = "low"
    HIGH = "high"


@dataclass(frozen=True)
class Settings:
    percent: int
    share: float = 0.5
    on: bool = False
    name: str = field(default="x", metadata={"help": "What it is called."})
    names: list[str] = field(default_factory=list)
    fixed: tuple[str, ...] = ()
    keys: dict[str, str] = field(default_factory=dict)
    mode: Literal["soft", "hard", 3] = "soft"
    level: Level = Level.LOW
    maybe: int | None = None
    made: str = field(init=False, default="made")

    def __post_init__(self) -> None:
        if self.percent > 100:
            raise ValueError(f"percent is {self.percent}, more than all")


def error_of(configured: dict[str, Any] | None, of: Any = Settings) -> str:
    with pytest.raises(HookError) as caught:
        settings_of(of, configured, WHERE)
    return str(caught.value)


def test_missing_keys_have_their_default() -> None:
    made = settings_of(Settings, {"percent": 5}, WHERE)
    assert made == Settings(5)
    assert (made.names, made.maybe, made.made) == ([], None, "made")


def test_values_of_every_type_are_read() -> None:
    configured = {
        "percent": 5, "share": 1, "on": True, "name": "n", "names": ("a", "b"), "fixed": ["c"],
        "keys": FrozenMapping({"a": "b"}), "mode": 3, "level": "high", "maybe": 7,
    }  # fmt: skip
    made = settings_of(Settings, configured, WHERE)
    assert made == Settings(5, 1.0, True, "n", ["a", "b"], ("c",), {"a": "b"}, 3, Level.HIGH, 7)
    kinds = [type(getattr(made, name)) for name in ("share", "names", "fixed", "keys", "mode", "level")]
    assert kinds == [float, list, tuple, dict, int, Level]


@pytest.mark.parametrize(
    ("configured", "error"),
    [
        ({}, "percent: is missing; it must be a whole number"),
        (None, "percent: is missing; it must be a whole number"),
        ({"percent": "5"}, "percent: must be a whole number, not a string ('5')"),
        ({"percent": True}, "percent: must be a whole number, not true or false ('True')"),
        ({"percent": 5.0}, "percent: must be a whole number, not a number ('5.0')"),
        ({"share": "a"}, "share: must be a number, not a string ('a')"),
        ({"share": True}, "share: must be a number, not true or false ('True')"),
        ({"on": 1}, "on: must be true or false, not a whole number ('1')"),
        ({"name": 1.1}, "name: must be a string, not a number ('1.1'): put it in quotes"),
        ({"name": True}, "name: must be a string, not true or false ('True'): put it in quotes"),
        ({"name": ("a",)}, "name: must be a string, not a list"),
        ({"names": "a"}, "names: must be a list of strings, not a string ('a')"),
        ({"names": ("a", 2)}, "names[1]: must be a string, not a whole number ('2'): put it in quotes"),
        ({"fixed": FrozenMapping()}, "fixed: must be a list of strings, not keys with values"),
        ({"keys": ("a",)}, "keys: must be keys with strings, not a list"),
        ({"keys": {"a": 1}}, "keys[a]: must be a string, not a whole number ('1'): put it in quotes"),
        ({"mode": "hart"}, "mode: must be one of soft, hard, 3, not a string ('hart'); did you mean hard?"),
        ({"mode": "3"}, "mode: must be one of soft, hard, 3, not a string ('3')"),
        ({"mode": 3.0}, "mode: must be one of soft, hard, 3, not a number ('3.0')"),
        ({"level": "LOW"}, "level: must be one of low, high, not a string ('LOW'); did you mean low?"),
        ({"maybe": "x"}, "maybe: must be a whole number, not a string ('x')"),
        ({"percents": 1}, "percents: unknown key; did you mean percent?"),
        ({"q": 1}, "q: unknown key (there are: percent, share, on, name, names, fixed, keys, mode, level,"),
        ({"made": "x"}, "made: unknown key"),
    ],
)  # fmt: skip
def test_every_error_names_its_key(configured: dict[str, Any] | None, error: str) -> None:
    if configured and "percent" not in configured:
        configured = {"percent": 5, **configured}
    assert error_of(configured).startswith(f"{WHERE}.{error}")


def test_all_errors_are_reported_together() -> None:
    assert error_of({"on": 5, "x": 1}).count(WHERE) == 3


def test_a_hook_may_check_its_settings_as_a_whole() -> None:
    assert error_of({"percent": 101}) == f"{WHERE}: percent is 101, more than all"


def test_the_error_of_a_missing_key_has_its_help() -> None:
    @dataclass
    class Needs:
        port: int = field(metadata={"help": "Where it listens."})

    assert error_of({}, Needs) == f"{WHERE}.port: is missing; it must be a whole number (Where it listens.)"


def test_settings_of_a_hook_without_settings_are_refused() -> None:
    assert settings_of(None, None, WHERE) is None
    assert settings_of(None, {}, WHERE) is None
    assert error_of({"a": 1, "b": 2}, None) == f"{WHERE}: this hook has no settings, and a, b is given"


class NoDataclass:
    a: int = 1


@dataclass
class Sets:
    a: set[str] = field(default_factory=set)


@dataclass
class Both:
    a: int | str = 1


@dataclass
class WrongDefault:
    a: int = "1"  # type: ignore[assignment]


@dataclass
class WrongInside:
    a: dict[str, int] = field(default_factory=lambda: {"b": 0.5})  # type: ignore[dict-item]


@dataclass
class Numbers:
    ids: list[int] = field(default_factory=list)
    parts: tuple[float, ...] = (0.5, 1)
    weights: dict[str, int] = field(default_factory=dict)
    none: str = None  # type: ignore[assignment]


def test_lists_and_maps_of_numbers_are_read() -> None:
    configured = {"ids": [1, 2], "parts": [1, 0.5], "weights": FrozenMapping({"a": 3})}
    assert settings_of(Numbers, configured, WHERE) == Numbers([1, 2], (1.0, 0.5), {"a": 3})
    assert (
        error_of({"ids": [1, "2"]}, Numbers) == f"{WHERE}.ids[1]: must be a whole number, not a string ('2')"
    )
    assert error_of({"ids": 1}, Numbers).endswith("must be a list of whole numbers, not a whole number ('1')")
    assert error_of({"weights": {"a": 0.5}}, Numbers).endswith(
        ".weights[a]: must be a whole number, not a number ('0.5')"
    )
    assert error_of({"weights": [1]}, Numbers).endswith("must be keys with whole numbers, not a list")


@dataclass
class Unknown:
    a: Nowhere = 1  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (NoDataclass, "Settings is not a dataclass: put @dataclass above it"),
        (Settings(1), "Settings is not a dataclass: put @dataclass above it"),
        (Sets, "Settings.a is a set[str]; it can be bool, int, float, str, list[str], "),
        (Both, "Settings.a is a int | str; it can be bool"),
        (WrongDefault, "the default of Settings.a: must be a whole number, not a string ('1')"),
        (
            WrongInside,
            "the default of Settings.a[b]: must be a whole number, not a number ('0.5')",
        ),
        (Unknown, "the types of Settings cannot be read: name 'Nowhere' is not defined"),
    ],
)
def test_undeclarable_settings_are_reported(settings: Any, error: str) -> None:
    assert error_of({}, settings).startswith(error)


def test_declared_settings_can_be_listed() -> None:
    listed = {key.name: key for key in keys_of(Settings)}
    assert list(listed)[:3] == ["percent", "share", "on"]
    assert (listed["percent"].required, listed["share"].required) == (True, False)
    assert (listed["name"].default, listed["name"].help) == ("x", "What it is called.")
    assert (listed["names"].default, listed["level"].wants) == ([], "one of low, high")


PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([key.name for key in keys_of(Settings)]) | st.text(max_size=3), PLAIN))
def test_any_configuration_is_read_with_its_types_or_refused(configured: dict[str, Any]) -> None:
    try:
        made = settings_of(Settings, {"percent": 1, **configured}, WHERE)
    except HookError:
        return
    assert type(made.percent) is int
    assert type(made.share) is float
    assert type(made.on) is bool
    assert type(made.name) is str
    assert all(type(name) is str for name in (*made.names, *made.fixed, *made.keys, *made.keys.values()))
    assert made.mode in ("soft", "hard", 3)
    assert made.level in Level
