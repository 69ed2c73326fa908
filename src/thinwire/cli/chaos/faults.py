"""The faults: what is done to the ranks, and what must come of it.

A fault is a function of a `Scene`. It inflicts something, waits for what must happen, and takes it back. A new one is a
function and a line of `FAULTS`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from thinwire.cli.chaos.scene import Scene

_CRAWL = "1kbit"
# Shares of the timeout for which a pause must be borne: after it the ranks need some of the rest to go on.
_BEARABLE = (0.05, 0.4)
_LONGEST_CUT = 1.0


def kill(scene: Scene) -> None:
    """SIGKILL of a rank or two: connections close."""
    victims = scene.choose(2 if len(scene.ranks) > 2 and scene.random.random() < 0.25 else 1)
    scene.inflict(victims)
    for rank in victims:
        rank.signal(signal.SIGKILL)
    scene.expect_loss(scene.all_but(victims))


def kill_while_starting(scene: Scene) -> None:
    """The same before the first step, while ranks agree on what they are about to do, and load a checkpoint."""
    victims = scene.choose(1)
    scene.inflict(victims)
    victims[0].signal(signal.SIGKILL)
    scene.expect_end(scene.all_but(victims), any_error=True)


def freeze_for_good(scene: Scene) -> None:
    """SIGSTOP of a rank that never comes back: nothing closes."""
    victims = scene.choose(1)
    scene.inflict(victims)
    victims[0].signal(signal.SIGSTOP)
    scene.expect_loss(scene.all_but(victims))
    victims[0].signal(signal.SIGKILL)


def freeze_too_long(scene: Scene) -> None:
    """SIGSTOP of a rank that comes back when the others have given up: it has to give up too."""
    victims = scene.choose(1)
    scene.inflict(victims)
    victims[0].signal(signal.SIGSTOP)
    scene.expect_loss(scene.all_but(victims))
    scene.begin_again()
    victims[0].signal(signal.SIGCONT)
    scene.expect_loss(victims)


def freeze_briefly(scene: Scene) -> None:
    """SIGSTOP of a rank that comes back in time."""
    victims = scene.choose(1)
    scene.inflict(victims)
    victims[0].signal(signal.SIGSTOP)
    scene.wait(scene.timeout * scene.random.uniform(*_BEARABLE))
    victims[0].signal(signal.SIGCONT)
    scene.expect_progress()


def cut(scene: Scene) -> None:
    """A cable is pulled: on both sides of it ranks are out of reach."""
    victims = scene.choose(1)
    scene.inflict(victims)
    scene.testbed.cut(victims[0].number)
    scene.expect_loss(scene.ranks)
    scene.testbed.mend(victims[0].number)


def cut_briefly(scene: Scene) -> None:
    """A cable is pulled and plugged in again: TCP bears it."""
    victims = scene.choose(1)
    scene.inflict(victims)
    scene.testbed.cut(victims[0].number)
    scene.wait(min(_LONGEST_CUT, 0.2 * scene.timeout) * scene.random.random())
    scene.testbed.mend(victims[0].number)
    scene.expect_progress()


def crawl(scene: Scene) -> None:
    """A link at 1 kbit/s is as good as none."""
    victims = scene.choose(1)
    scene.inflict(victims)
    scene.testbed.set_rate(_CRAWL, host=victims[0].number)
    scene.expect_loss(scene.ranks)
    scene.testbed.set_rate(None)


def slow_down(scene: Scene) -> None:
    """Links of 1 to 100 Mbit/s, here and there, are slow and no more."""
    victims = scene.choose(scene.random.randint(1, len(scene.ranks)))
    scene.inflict(victims)
    for rank in victims:
        scene.testbed.set_rate(f"{10 ** scene.random.uniform(0, 2):.3f}mbit", host=rank.number)
    goes_on = scene.expect_progress()
    scene.testbed.set_rate(None)
    if goes_on:
        scene.expect_progress()


def corrupt(scene: Scene) -> None:
    """A bit of a packet is flipped on its way: nobody applies the step, unless the packet says it twice."""
    victims = scene.choose(1)
    scene.inflict(victims)
    victims[0].tell(f"corrupt {scene.random.random()}")
    if scene.corrupted_by(victims[0]) == "twice":
        scene.expect_progress()
    else:
        scene.expect_corruption()


def interrupt(scene: Scene) -> None:
    """SIGTERM or Ctrl-C for all, as launchers and people do it."""
    scene.inflict(scene.ranks)
    number = scene.random.choice((signal.SIGTERM, signal.SIGINT))
    for rank in scene.ranks:
        rank.signal(number)
    scene.expect_end(scene.ranks, errors=("SystemExit", "KeyboardInterrupt", "PeerLost"))


FAULTS: dict[str, Callable[[Scene], None]] = {
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
