"""Values of an untrusted JSON file, checked one by one: an error names the field."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

LONGEST_NAME = 200
LONGEST_TEXT = 1_000_000
LARGEST_INTEGER = 2**63 - 1


@dataclass(frozen=True)
class Field:
    """A value, and where it is in the file: ``turns[3].step[0]``."""

    path: str
    value: Any

    def wrong(self, expected: str) -> ValueError:
        """The error that says what would be right."""
        return ValueError(f"{self.path}: expected {expected}, got {reprlib.repr(self.value)}")

    def members(self, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Field]:
        """The fields of an object that has these names and no others."""
        found = dict(self.entries())
        for name in names:
            if name not in found:
                raise ValueError(f"{self.path}.{name}: missing")
        for name in found:
            if name not in names and name not in optional:
                raise ValueError(f"{self.path}: unknown field {reprlib.repr(name)}; there are {', '.join(names)}")
        return found

    def entries(self) -> Iterator[tuple[str, Field]]:
        """The fields of an object with names of any kind."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        for name, value in self.value.items():
            key = Field(f"{self.path}: the name of a field", name).text(LONGEST_NAME)
            yield key, Field(f"{self.path}.{reprlib.repr(name)[1:-1]}", value)

    def items(self, least: int, most: int) -> list[Field]:
        """The elements of a list."""
        if not isinstance(self.value, list) or not least <= len(self.value) <= most:
            raise self.wrong(f"a list of {least} to {most} elements")
        return [Field(f"{self.path}[{number}]", value) for number, value in enumerate(self.value)]

    def text(self, longest: int = LONGEST_TEXT) -> str:
        """A string that can be written to a file."""
        if not isinstance(self.value, str) or len(self.value) > longest:
            raise self.wrong(f"a text of at most {longest:,} characters")
        try:
            self.value.encode()
        except UnicodeEncodeError:
            raise self.wrong("a text without half of a surrogate pair") from None
        return self.value

    def name(self) -> str:
        """A string in one line."""
        if not self.value or not self.text(LONGEST_NAME).isprintable():
            raise self.wrong("a name of printable characters")
        return self.value

    def one_of(self, known: Collection[str]) -> str:
        """One of the strings in `known`."""
        if not isinstance(self.value, str) or self.value not in known:
            raise self.wrong(f"one of {', '.join(known)}")
        return self.value

    def any_number(self) -> float:
        """A number, NaN and the infinities included."""
        if not isinstance(self.value, int | float) or isinstance(self.value, bool):
            raise self.wrong("a number")
        return self.value

    def number(self, least: float, most: float) -> float:
        """A number in a range; NaN is in none."""
        if not least <= self.any_number() <= most:
            raise self.wrong(f"a number from {least:g} to {most:g}")
        return self.value

    def integer(self, least: int, most: int) -> int:
        """A whole number."""
        if type(self.value) is not int or not least <= self.value <= most:
            raise self.wrong(f"a whole number from {least} to {most}")
        return self.value

    def scalar(self) -> str | float | bool | None:
        """Anything but an object or a list."""
        if self.value is None or isinstance(self.value, bool):
            return self.value
        if isinstance(self.value, str):
            return self.text()
        return self.number(-LARGEST_INTEGER, LARGEST_INTEGER)
