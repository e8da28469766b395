"""Amounts of resources, parsed as in Kubernetes."""

from __future__ import annotations

from decimal import ROUND_UP, Decimal, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.model.quantity import LARGEST, parse_quantity, show_quantity


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", 0),
        ("2", 2),
        ("+2", 2),
        ("-2", -2),
        ("1.", 1),
        (".5", 1),
        ("0.5", 1),
        ("-0.5", -1),
        ("1.0", 1),
        ("1.000000000001", 2),
        ("1n", 1),
        ("1000000000n", 1),
        ("2000000u", 2),
        ("500m", 1),
        ("1001m", 2),
        ("1k", 1000),
        ("1M", 10**6),
        ("1G", 10**9),
        ("1T", 10**12),
        ("1P", 10**15),
        ("1E", 10**18),
        ("1Ki", 1024),
        ("1Mi", 1 << 20),
        ("1.5Gi", 3 << 29),
        ("1Ti", 1 << 40),
        ("1Pi", 1 << 50),
        ("7Ei", 7 << 60),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1E+3", 1000),
        ("1500e-3", 2),
        ("12.5e1", 125),
        ("9Ei", 9223372036854775807),
        ("-9Ei", -LARGEST),
        ("1e999999999", LARGEST),
        ("0e999999999", 0),
        ("1e-999999999", 1),
        ("0" * 99 + "1", 1),
        (2, 2),
        (-2, -2),
        (0.5, 1),
        (1e16, 10**16),
        (1e-7, 1),
    ],
)
def test_amounts_are_parsed(text: str | float, amount: int) -> None:
    assert parse_quantity(text) == amount


@pytest.mark.parametrize(
    ("text", "amount"),
    [("500m", 500), ("2", 2000), (0.1, 100), ("0.0001", 1), ("1u", 1), ("1k", 10**6), ("1Ki", 1024000)],
)
def test_amounts_in_thousandths_are_parsed(text: str | float, amount: int) -> None:
    assert parse_quantity(text, milli=True) == amount


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not an amount such as 2, 500m or 1Gi"),
        (" 1", "' 1' is not an amount such as"),
        ("1 ", "'1 ' is not an amount: ' ' is not a suffix (known: n u m k M G T P E Ki Mi Gi Ti Pi Ei)"),
        ("1 Gi", "' Gi' is not a suffix"),
        (".", "'.' is not an amount such as"),
        ("--1", "'--1' is not an amount such as"),
        ("1.2.3", "'.3' is not a suffix"),
        ("1e", "'e' is not a suffix; did you mean E?"),
        ("1e1.5", "'e1.5' is not a suffix"),
        ("1K", "'K' is not a suffix; did you mean k?"),
        ("1GB", "'GB' is not a suffix"),
        ("1gi", "'gi' is not a suffix; did you mean Gi?"),
        ("1mi", "'mi' is not a suffix; did you mean Mi?"),
        ("0x10", "'x10' is not a suffix"),
        ("1_000", "'_000' is not a suffix"),
        ("1\n", "'\\n' is not a suffix"),
        ("٣", "'٣' is not an amount such as"),
        ("1" * 101, "'11111111111111111111'... is too long for an amount"),
        (float("nan"), "'nan' is not an amount such as"),
        (float("inf"), "'inf' is not an amount such as"),
        (True, "True is not an amount"),
        (None, "None is not an amount"),
    ],
)
def test_texts_that_are_not_amounts_are_refused_with_the_cause(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_quantity(text)
    assert message in str(caught.value)


POWERS = {
    "n": "1e-9",
    "u": "1e-6",
    "m": "1e-3",
    "": "1",
    "k": "1e3",
    "E": "1e18",
    "e-2": "1e-2",
    "Ki": "1024",
}


@given(st.decimals("-1e12", "1e12", places=5), st.sampled_from(sorted(POWERS)), st.booleans())
def test_an_amount_is_the_decimal_times_its_suffix_rounded_away_from_zero(
    number: Decimal, suffix: str, milli: bool
) -> None:
    with localcontext() as context:
        context.prec = 60
        exact = number * Decimal(POWERS[suffix]) * (1000 if milli else 1)
        want = int(exact.to_integral_value(ROUND_UP))
    assert parse_quantity(f"{number:f}{suffix}", milli=milli) == max(-LARGEST, min(want, LARGEST))


@given(st.integers(0, LARGEST) | st.integers(0, 4000).map(lambda n: n << 40), st.booleans())
def test_a_shown_amount_reads_back(amount: int, milli: bool) -> None:
    assert parse_quantity(show_quantity(amount, milli=milli), milli=milli) == min(amount, LARGEST)


def test_amounts_are_shown_short() -> None:
    assert [show_quantity(n) for n in (0, 1023, 1024, 3 << 29, 5 << 30)] == [
        "0",
        "1023",
        "1Ki",
        "1536Mi",
        "5Gi",
    ]
    assert [show_quantity(n, milli=True) for n in (0, 500, 2000, 2500)] == ["0", "500m", "2", "2500m"]
