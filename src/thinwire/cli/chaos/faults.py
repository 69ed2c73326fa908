"""The faults: what is done to the ranks, and what must follow.

A fault is a function of an `Injection`. It does something to the ranks or their links, waits for the consequences, and
repairs the links. To add one, write a function and add a line to `FAULTS`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from thinwire.cli.chaos.injection import Injection

_CRAWL = "1kbit"
# One after another in a step: two exchanges of two messages each, and the commit round. At this rate a message may come
# just in time, and only the next one is too late.
_MOST_WAITS = 5
# Shares of the timeout for which a pause must be borne: after it the ranks need some of the rest to go on.
_BEARABLE = (0.05, 0.4)
_LONGEST_CUT = 1.0


def kill(injection: Injection) -> None:
    """SIGKILL of a rank or two: connections close."""
    victims = injection.choose(2 if len(injection.ranks) > 2 and injection.random.random() < 0.25 else 1)
    injection.inflict(victims)
    for rank in victims:
        rank.signal(signal.SIGKILL)
    injection.expect_loss(injection.all_but(victims))


def kill_while_starting(injection: Injection) -> None:
    """The same before the first step, while ranks agree on what they are about to do, and load a checkpoint."""
    victims = injection.choose(1)
    injection.inflict(victims)
    victims[0].signal(signal.SIGKILL)
    injection.expect_end(injection.all_but(victims), any_error=True)


def freeze_for_good(injection: Injection) -> None:
    """SIGSTOP of a rank that never comes back: nothing closes."""
    victims = injection.choose(1)
    injection.inflict(victims)
    victims[0].signal(signal.SIGSTOP)
    injection.expect_loss(injection.all_but(victims))
    victims[0].signal(signal.SIGKILL)


def freeze_too_long(injection: Injection) -> None:
    """SIGSTOP of a rank that comes back when the others have given up: it has to give up too."""
    victims = injection.choose(1)
    injection.inflict(victims)
    victims[0].signal(signal.SIGSTOP)
    injection.expect_loss(injection.all_but(victims))
    injection.begin_again()
    victims[0].signal(signal.SIGCONT)
    injection.expect_loss(victims)


def freeze_briefly(injection: Injection) -> None:
    """SIGSTOP of a rank that comes back in time."""
    victims = injection.choose(1)
    injection.inflict(victims)
    victims[0].signal(signal.SIGSTOP)
    injection.wait(injection.timeout * injection.random.uniform(*_BEARABLE))
    victims[0].signal(signal.SIGCONT)
    injection.expect_progress()


def cut(injection: Injection) -> None:
    """A cable is pulled: on both sides of it ranks are out of reach."""
    victims = injection.choose(1)
    injection.inflict(victims)
    injection.testbed.cut(victims[0].number)
    injection.expect_loss(injection.ranks)
    injection.testbed.mend(victims[0].number)


def cut_briefly(injection: Injection) -> None:
    """A cable is pulled and plugged in again: TCP bears it."""
    victims = injection.choose(1)
    injection.inflict(victims)
    injection.testbed.cut(victims[0].number)
    injection.wait(min(_LONGEST_CUT, 0.2 * injection.timeout) * injection.random.random())
    injection.testbed.mend(victims[0].number)
    injection.expect_progress()


def crawl(injection: Injection) -> None:
    """A link at 1 kbit/s is as good as none."""
    victims = injection.choose(1)
    injection.inflict(victims)
    injection.testbed.set_rate(_CRAWL, host=victims[0].number)
    injection.expect_loss(injection.ranks, waits=_MOST_WAITS)
    injection.testbed.set_rate(None)


def slow_down(injection: Injection) -> None:
    """Links of 1 to 100 Mbit/s, here and there, are slow and no more."""
    victims = injection.choose(injection.random.randint(1, len(injection.ranks)))
    injection.inflict(victims)
    for rank in victims:
        injection.testbed.set_rate(f"{10 ** injection.random.uniform(0, 2):.3f}mbit", host=rank.number)
    goes_on = injection.expect_progress()
    injection.testbed.set_rate(None)
    if goes_on:
        injection.expect_progress()


def corrupt(injection: Injection) -> None:
    """A bit of a packet is flipped on its way: no rank applies the step, unless the packet is sent twice."""
    victims = injection.choose(1)
    injection.inflict(victims)
    victims[0].send(f"corrupt {injection.random.random()}")
    if injection.corrupted_by(victims[0]) == "twice":
        injection.expect_progress()
    else:
        injection.expect_corruption()


def interrupt(injection: Injection) -> None:
    """SIGTERM or Ctrl-C for all, as launchers and people do it."""
    injection.inflict(injection.ranks)
    number = injection.random.choice((signal.SIGTERM, signal.SIGINT))
    for rank in injection.ranks:
        rank.signal(number)
    injection.expect_end(injection.ranks, errors=("SystemExit", "KeyboardInterrupt", "PeerLost"))


FAULTS: dict[str, Callable[[Injection], None]] = {
    "kill": kill,
    "kill while starting": kill_while_starting,
    "freeze for good": freeze_for_good,
    "freeze too long": freeze_too_long,
    "freeze briefly": freeze_briefly,
    "cut": cut,
    "cut briefly": cut_briefly,
    "1 kbit/s": crawl,
    "1 to 100 Mbit/s": slow_down,
    "corrupt packet": corrupt,
    "interrupt": interrupt,
}
AT_START = {"kill while starting"}
"""Those that do not wait for the first step."""
