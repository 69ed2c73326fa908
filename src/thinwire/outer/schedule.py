"""When fragments are exchanged: a function of the number of inner steps alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thinwire._checks import INT64_MAX, is_integer

Every = int | list[int] | tuple[int, ...] | Callable[[int], int]
"""The number of inner steps between two outer ones; of each rank, if they differ; or a function from the number of
intervals so far to it."""


class Schedule:
    """Counts inner steps, and says which fragment is exchanged after which of them.

    An interval has `every` inner steps. Fragment p of P is sent after ⌊(p + 1)·every/P⌋ of them, so that one is in
    flight at a time, and the last is sent at the end of the interval.

    Args:
        every: the length of an interval.
        fragments: their number.
        delay: the number of inner steps between sending a fragment and applying the answer.

    Raises:
        ValueError: naming the argument that is out of range.
    """

    def __init__(self, every: Every, fragments: int, delay: int) -> None:
        if not is_integer(fragments, 1, INT64_MAX):
            raise ValueError(f"fragments={fragments!r}: expected an integer of at least 1")
        if not is_integer(delay, 0, INT64_MAX):
            raise ValueError(f"delay={delay!r}: expected a number of inner steps, at least 0")
        self.every: int | tuple[int, ...] | Callable[[int], int]
        if isinstance(every, (list, tuple)):
            self.every = tuple(every)
            for rank, length in enumerate(self.every):
                _check_length(length, f"every[{rank}]", fragments, delay)
        else:
            if not callable(every):
                _check_length(every, "every", fragments, delay)
            self.every = every
        self.rank = 0
        """The place of this rank in `every`, if that has a number for each."""
        self.fragments = fragments
        self.delay = delay
        self.step = 0
        """The number of inner steps so far."""
        self.outer_step = 0
        """The number of intervals so far."""
        self._begun = 0
        """The number of inner steps before the interval."""
        self._length = 0
        """The length of the interval; 0 before the first."""

    @property
    def length(self) -> int:
        """The number of inner steps of the interval under way.

        Raises:
            ValueError: if `every` is a function, and returns something else than such a number.
        """
        if not self._length:
            if callable(self.every):
                length = self.every(self.outer_step)
                _check_length(length, f"every({self.outer_step})", self.fragments, self.delay)
                self._length = length
            else:
                self._length = self.every[self.rank] if isinstance(self.every, tuple) else self.every
        return self._length

    @property
    def of_each_rank(self) -> tuple[int, ...] | None:
        """The lengths of all ranks, if they differ."""
        return self.every if isinstance(self.every, tuple) else None

    def common(self) -> dict[str, int]:
        """The numbers of the interval under way that are equal on all ranks, by their names."""
        if self.of_each_rank is not None:
            return {"outer_steps": self.outer_step}
        return {"every": self.length, "inner_steps": self.step}

    def advance(self) -> tuple[int | None, dict[str, int]]:
        """Count an inner step. Returns the fragment that is sent after it, if any, and the numbers of `common`."""
        self.step += 1
        common = self.common()
        done = self.step - self._begun
        places = [(p + 1) * self.length // self.fragments for p in range(self.fragments)]
        fragment = places.index(done) if done in places else None
        if done >= self.length:
            self.restart()
        return fragment, common

    def restart(self) -> None:
        """Begin an interval."""
        self.outer_step += 1
        self._begun = self.step
        self._length = 0

    # Saving ----------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, int]:
        """What must be saved."""
        return {"step": self.step, "outer_step": self.outer_step, "begun": self._begun, "length": self._length}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.step, self.outer_step = state["step"], state["outer_step"]
        self._begun, self._length = state["begun"], state["length"]

    @staticmethod
    def check(state: Any) -> None:
        """Check what `load` will be given.

        Raises:
            ValueError: if no run can have saved it.
        """
        names = ("step", "outer_step", "begun", "length")
        if not isinstance(state, dict) or not all(is_integer(state.get(name), 0, INT64_MAX) for name in names):
            raise ValueError(f"the counters of the state dict are {state!r:.80}: expected {', '.join(names)}")
        if not state["begun"] <= state["step"]:
            raise ValueError(f"the state dict is of step {state['step']}, in an interval after {state['begun']} steps")


def _check_length(length: object, name: str, fragments: int, delay: int) -> None:
    if not is_integer(length, 1, INT64_MAX):
        raise ValueError(f"{name}={length!r}: expected a number of inner steps, at least 1")
    assert isinstance(length, int)
    if length < fragments:
        raise ValueError(f"{name}={length} with fragments={fragments}: expected at least one inner step per fragment")
    most = min(length // fragments, length - 1)
    if delay > most:
        raise ValueError(
            f"delay={delay} with {name}={length} and fragments={fragments}: expected at most {most}, so that an answer "
            "is applied before the next fragment is sent"
        )
