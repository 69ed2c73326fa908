"""Ranks that only act as if they trained, to see whether `thinwire chaos` notices what real ones must not do.

They write heartbeats into their folder instead of sending packets, and play the part whose name is in the file `part`
beside their checkpoints. They notice at once that one of them has ended, as by a closed connection.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from tests.testbeds import is_gone
from thinwire.cli.chaos.worker import RankConfig, report
from thinwire.errors import PeerLost

STEP_SECONDS = 0.02
PATIENCE_SECONDS = 30.0
"""With another one that lives but does not go on: on a busy machine it may wait for a core."""
NERVOUS_SECONDS = STEP_SECONDS / 4


class Actor:
    def __init__(self, config: RankConfig, channel: Connection) -> None:
        self.config, self.channel = config, channel
        folder = Path(config.checkpoints)
        folder.mkdir(exist_ok=True)
        self.checkpoint = folder / "step"
        self.part = folder.with_name("part").read_text()
        self.on_stage = Path(config.folder)
        # The reference run is to be sound.
        self.disturbed = folder.name == "checkpoints"

    def play(self) -> None:
        with open(self.config.stacks, "wb") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            try:
                self.train()
            except PeerLost as error:
                self.fail(error)

    def train(self) -> None:
        restored = int(self.checkpoint.read_text()) if self.checkpoint.exists() else 0
        first = 0 if self.part == "forgets" else restored
        # Steps take long where a fault is to come, so that on a busy machine it comes before the end.
        awaits_fault = self.disturbed and not restored
        patience = NERVOUS_SECONDS if self.part == "nervous" and awaits_fault else PATIENCE_SECONDS
        if first:
            digest = "other" if self.part == "diverges" and self.config.rank == 1 else self.saved_digest(first)
        else:
            digest = self.digest(first, restored)
        report(self.channel, "ready", step=first, digest=digest)
        for step in range(first + 1, self.config.episode.steps + 1):
            if awaits_fault:
                time.sleep(STEP_SECONDS)
            self.wait_for_the_others(step, patience)
            report(self.channel, "step", step=step, digest=self.digest(step, restored))
            if step > restored:  # in every step: on a busy machine a fault may come in one of the first
                if self.config.rank == 0:
                    written = self.on_stage / "checkpoint"
                    written.write_text(str(step))
                    written.replace(self.checkpoint)
                report(self.channel, "saved", step=step, digest=self.saved_digest(step))
        skipped = 7 if self.part == "miscounts" and self.disturbed else 3
        report(self.channel, "done", digest="end", skipped=skipped)
        with suppress(EOFError):
            self.channel.recv()
        if self.part == "lingers" and self.disturbed:
            time.sleep(600)

    def digest(self, step: int, restored: int) -> str:
        diverges = self.part == "diverges" and restored > 0 and self.config.rank == 1
        return f"{'other' if diverges else 'same'} {step}"

    def saved_digest(self, step: int) -> str:
        """As of an optimizer whose ranks are made equal when they save."""
        return f"saved {step}"

    def wait_for_the_others(self, step: int, patience: float) -> None:
        """Nobody is more than a step ahead; a file has the process id of its rank, and its time stamp is the step."""
        beats = [self.on_stage / f"beat-{rank}" for rank in range(self.config.episode.ranks)]
        new = self.on_stage / f"new-beat-{self.config.rank}"
        new.write_text(str(os.getpid()))
        os.utime(new, (step, step))
        new.replace(beats[self.config.rank])
        deadline = time.monotonic() + patience
        while behind := [beat for beat in beats if not beat.exists() or beat.stat().st_mtime < step - 1]:
            ended = [beat for beat in behind if beat.exists() and is_gone(int(beat.read_text()))]
            # What it has written last may have come after the look at its file.
            if time.monotonic() > deadline or any(beat.stat().st_mtime < step - 1 for beat in ended):
                raise PeerLost("heartbeats", "there were none")
            time.sleep(0.001)

    def fail(self, error: PeerLost) -> None:
        types = ["ValueError"] if self.part == "raises another error" else [type(error).__name__]
        report(self.channel, "raised", stage="training", types=types, message=str(error), digest="")
        if self.part == "hangs":
            time.sleep(600)
        if self.part == "aborts":
            os.abort()


def act(channel: Connection, config: RankConfig) -> None:
    Actor(config, channel).play()
    os._exit(0)  # torch, which they do not need, takes its time to leave
