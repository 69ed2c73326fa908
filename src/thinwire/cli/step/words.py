"""Numbers as text, the same in tables, charts and on the page."""

from __future__ import annotations

import unicodedata

from thinwire.cli.units import byte_count, rate

__all__ = ["byte_count", "rate", "ratio", "seconds", "short_byte_count", "shortened", "span", "visible"]

# Control characters, formats such as a change of direction, half surrogate pairs, separators of lines and paragraphs.
_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def visible(text: str) -> str:
    """Text with characters that steer a terminal or a browser written as Python would write them."""
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in _INVISIBLE and character not in "\n\t"
        else character
        for character in text
    )


def shortened(name: str, longest: int = 24) -> str:
    """A name that fits beside a chart."""
    return name if len(name) <= longest else name[: longest - 1] + "…"


def seconds(value: float) -> str:
    """With three digits, in ms or s."""
    # Below one second with three digits, and not 1e+03 ms.
    return f"{value:.2f} s" if value >= 10 else f"{value:.3g} s" if value >= 0.9995 else f"{1e3 * value:.3g} ms"


def span(low: float, high: float) -> str:
    """Two times with one unit."""
    scale, unit = (1.0, "s") if high >= 1 else (1e3, "ms")
    return f"{scale * low:.3g}–{scale * high:.3g} {unit}"


def short_byte_count(value: float) -> str:
    """For the ticks of an axis, which are round numbers."""
    return byte_count(value).replace(".00", "")


def ratio(value: float | None) -> str:
    """With three digits, or nothing where there is nothing to compare with."""
    return "" if value is None else f"{value:.1f}×" if value >= 10 else f"{value:.2f}×"
