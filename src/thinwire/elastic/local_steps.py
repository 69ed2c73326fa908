"""`thinwire.elastic.ElasticLocalSteps`: local steps with workers that come and go."""

from __future__ import annotations

import functools
import logging
import math
import os
import socket
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from thinwire._checks import INT64_MAX, is_integer
from thinwire._version import __version__
from thinwire.averaging.catalogue import rule_of
from thinwire.elastic.memory import ErrorMemory
from thinwire.elastic.quorum import ALONE, Quorum
from thinwire.errors import CorruptPacket, PeerLost
from thinwire.local_steps import LocalSteps
from thinwire.metrics import Metrics
from thinwire.optimizers.agreement import require_same
from thinwire.optimizers.inputs import make_plain
from thinwire.outer.fragment import has_values
from thinwire.outer.metrics import LocalMetrics, continued, local_metrics
from thinwire.outer.schedule import Every, Schedule
from thinwire.transport.peers import Peers

_LOG = logging.getLogger(__name__)
_LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
_OWN = "thinwire"
"""The entry of a state dict that holds everything but the state of the inner optimizer."""
_UNSUPPORTED = ("powersgd", "count_sketch")
"""Compressors whose state is more than residuals."""
_REFUSED = {
    ("delay", "mix", "process_group", "topology", "mesh", "node_dtype"): (
        "Its exchanges end in the step() in which they begin, between workers of one process each, whom torchft finds"
    ),
    ("error_reset", "step_compressor", "step_options"): (
        "With error reset, what messages leave out stays in the parameters of a worker, and would end with it"
    ),
}
"""Arguments of `LocalSteps` that make no sense here, and why."""
_EPOCHS = 1 << 24
"""Versions count exchanges, and quorums below that."""


class ElasticLocalSteps(LocalSteps):
    """`thinwire.LocalSteps` with workers that come and go: one that dies is dropped at the next exchange, without a
    restart of the others, and a new one gets the parameters of a living one. torchft decides who takes part.

    Example::

        inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
        opt = thinwire.elastic.ElasticLocalSteps(inner, every=30, compressor="int4")
        opt.join()                                                   # a late worker gets the others' parameters here
        ...
        loss.backward(); opt.step(); opt.zero_grad()                 # every 30th step exchanges with all living workers

    Each worker is one process, started in any way, with the address of torchft's Lighthouse in TORCHFT_LIGHTHOUSE::

        $ torchft_lighthouse --min_replicas 2 --join_timeout_ms 60000 --heartbeat_timeout_ms 5000

    torch.distributed need not be initialised. Each interval begins with a *quorum*: the Lighthouse says who is alive.
    After `every` inner steps these workers exchange as in `LocalSteps`, and Δ̄ is the mean over them. If one of them
    dies meanwhile, the exchange fails on the others. They are still at θ_ref and Δ of before, ask for another quorum,
    and exchange again. A worker whose exchange failed where another worker's succeeded gets the result from that one.

    What is lost when a worker dies: its inner steps since the last exchange, and its residuals. The others lose
    nothing: a survivor keeps its residual. Owners of shards change with the number of workers: what an owner's answers
    have left out, it adds to its own residual, times the new number of workers, so that the next mean has it.

    A worker that joins gets θ_ref, the outer momentum, and all counters; its residuals are zero, and so is the state of
    its inner optimizer. It begins with inner steps in the interval after the one in which it joined: in the exchange
    between them it takes part with the weight 0, and waits for the others.

    Replicas are equal to the bit after every exchange, as in `LocalSteps`. Workers compare settings and checksums of
    θ_ref whenever the members change.

    When not to use it: if workers are never lost, or all are started again together: `LocalSteps` with
    `thinwire.checkpoint` needs no Lighthouse. With several ranks per worker: a worker is one process here.

    Differences from torchft's own DiLoCo: exchanges are compressed, and go through owners of shards, so that what a
    worker receives does not grow with the number of workers. A failed exchange is tried again at once, while torchft
    drops the inner steps of all workers. A quorum is asked for when an interval begins and not when it ends, so that
    workers do not wait for the state that a new one fetches. A state is read without executing it.

    Args:
        inner, every, compressor, outer_lr, outer_momentum, fragments, weighted, clip_to_median, residual_decay,
            bucket_mb, max_consecutive_skips, check_replicas_every: see `thinwire.LocalSteps`. `every` is the same on
            all workers. `delay` is not offered: an exchange under way would have to survive its members.
        lighthouse: the address of the Lighthouse, such as "http://host:29510"; None for TORCHFT_LIGHTHOUSE.
        min_workers: exchange only if at least so many workers are alive.
        timeout: the seconds after which a worker that does not answer counts as dead, if its connections stay open.
            Longer than a new worker takes to fetch the state: 8 bytes per parameter.
        patience: the seconds to wait for enough workers.
        name: of this worker, for logs. Workers are ordered by name. It need not be unique.
        hostname: the name or address under which the other workers reach this one; None for the name of the machine.
        **options: options of the compressor, such as `block=32` of "int4".

    Raises:
        TypeError, ValueError: as `thinwire.LocalSteps`; for a compressor whose state cannot change hands.
    """

    def __init__(
        self,
        inner: Optimizer,
        every: Every = 30,
        compressor: str = "int4",
        *,
        lighthouse: str | None = None,
        min_workers: int = 1,
        timeout: float = 60.0,
        patience: float = 600.0,
        name: str = "",
        hostname: str | None = None,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        weighted: bool = False,
        clip_to_median: bool = False,
        residual_decay: float = 1.0,
        bucket_mb: float | None = None,
        max_consecutive_skips: int | None = 10,
        check_replicas_every: int = 10,
        **options: Any,
    ) -> None:
        for arguments, reason in _REFUSED.items():
            for argument in arguments:
                if argument in options:
                    raise TypeError(
                        f"{argument}={options[argument]!r}: ElasticLocalSteps has no such argument. {reason}"
                    )
        if isinstance(every, (list, tuple)):
            raise ValueError(f"every={every!r}: expected one number, or a function: workers have no fixed ranks")
        if compressor in _UNSUPPORTED:
            raise ValueError(
                f"compressor={compressor!r}: what it keeps depends on all members of a run, so it cannot go on with "
                "others. Use 'int4', for example"
            )
        lighthouse = os.environ.get(_LIGHTHOUSE) if lighthouse is None else lighthouse
        if not isinstance(lighthouse, str) or not lighthouse.startswith(("http://", "https://")):
            raise ValueError(
                f"lighthouse={lighthouse!r}: expected the address of torchft's Lighthouse here or in {_LIGHTHOUSE}, "
                "such as 'http://host:29510'"
            )
        if not is_integer(min_workers, 1, INT64_MAX):
            raise ValueError(f"min_workers={min_workers!r}: expected a number of at least 1")
        for argument, seconds in (("timeout", timeout), ("patience", patience)):
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 1 <= seconds < math.inf:
                raise ValueError(f"{argument}={seconds!r}: expected a number of seconds of at least 1")
        super().__init__(
            inner,
            every,
            compressor,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            fragments=fragments,
            weighted=weighted,
            clip_to_median=clip_to_median,
            residual_decay=residual_decay,
            topology="flat",
            bucket_mb=bucket_mb,
            max_consecutive_skips=max_consecutive_skips,
            check_replicas_every=check_replicas_every,
            **options,
        )
        self._open_quorum = functools.partial(
            Quorum,
            lighthouse,
            name=name,
            hostname=hostname or socket.gethostname(),
            least=min_workers,
            timeout=timeout,
            patience=patience,
            state=self._shared_state,
            take=self._take,
        )
        self._quorum: Quorum | None = None
        self._given_outer = (float(outer_lr), float(outer_momentum))
        self._exchange_with(ALONE)
        self._bound: Peers | None = None
        """The members with whom the averagers exchange; None if new averagers are needed."""
        self._memories = [ErrorMemory() for _ in range(fragments)]
        self._exchanges = [0] * fragments
        """Of each fragment, the number of exchanges of the run."""
        self._epoch = 0
        """The largest number of a quorum in which this worker's state was exchanged."""
        self._epoch_of_quorum = 0
        self._unfinished: tuple[int, int, ErrorMemory] | None = None
        """After an exchange that failed here: its fragment, the version that it would have made, and the residuals
        after it. It may have succeeded elsewhere."""
        self._due: tuple[int, dict[str, int]] | None = None
        """The fragment whose exchange is under way or must be repeated, and the numbers that all workers have then."""
        self._newcomer = False
        """Whether this worker got its parameters in the interval under way, in which it takes no inner steps."""
        self._taken = False
        self._contributors = 1
        self._past: list[Metrics | None] = [None] * fragments
        """Of each fragment, the totals of averagers that were replaced."""

    # Joining ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def join(self) -> None:
        """Join the run: wait for the others, and get their parameters if they are ahead. Call it once, before the first
        forward pass, with the model on its device, and after `load_state_dict`, if you resume.

        Raises:
            ConnectionError: if the Lighthouse cannot be reached.
            PeerLost: if there are too few workers for longer than `patience`.
            ValueError: if this worker's settings or its model are not those of the run, which goes on without it.
        """
        if self._closed:
            raise RuntimeError("this ElasticLocalSteps is closed: make a new one")
        if self._quorum is not None:
            raise RuntimeError("join() was called before: call it once")
        self._check_first()
        if not self._version:
            for fragment in self._fragments:
                fragment.take_references()
        self._agreed = True
        self._quorum = self._open_quorum()
        try:
            self._quorum.version = self._version
            self._meet()
            self._catch_up()
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> int:
        """The number of workers in the quorum of the interval under way."""
        return 1 if self._quorum is None else self._quorum.members.size

    @property
    def inner_steps(self) -> int:
        """The number of inner steps of the run: where a new worker's learning rate schedule begins."""
        return self._schedule.step

    def close(self) -> None:
        """Leave the run. The others go on without this worker."""
        super().close()
        if self._quorum is not None:
            quorum, self._quorum = self._quorum, None
            quorum.close()

    def _prepare(self) -> None:
        if self._quorum is None and not self._closed:
            raise RuntimeError("step() before join(): call join() once, before the first forward pass")
        super()._prepare()

    # An exchange -----------------------------------------------------------------------------------------------------

    def _exchange(self, fragment: int, common: Mapping[str, int]) -> None:
        self._exchange_until_done(fragment, common)
        self._catch_up()

    def _exchange_until_done(self, fragment: int, common: Mapping[str, int]) -> None:
        """Exchange a fragment, again if that fails, and begin the next interval. It is not exchanged if others have
        done so already: then this worker has their state."""
        self._due = (fragment, dict(common))
        exchanged = False
        while not exchanged:
            exchanged = self._attempt(fragment, common)
            if exchanged:
                self._due = None
            if self._meet():
                return

    def _catch_up(self) -> None:
        """While this worker has just got the state of others, take part in their exchange without inner steps."""
        while self._newcomer:
            self._exchange_until_done(*(self._due or self._next_due()))

    def _next_due(self) -> tuple[int, dict[str, int]]:
        """Count inner steps up to the next exchange: its fragment, and the numbers that all workers have then."""
        while True:
            fragment, common = self._schedule.advance()
            if fragment is not None:
                return fragment, common

    def _meet(self) -> bool:
        """Wait for the quorum of the next exchange. Returns whether this worker has got another one's state."""
        assert self._quorum is not None, "after join()"
        self._taken = False
        self._quorum.meet()
        if not self._quorum.version:
            self._quorum.version = self._version_of(0)
        self._unfinished = None
        return self._taken

    def _attempt(self, number: int, common: Mapping[str, int]) -> bool:
        """Exchange a fragment, and apply the mean. Returns whether that was possible: otherwise nothing has changed."""
        assert self._quorum is not None, "after join()"
        fragment, memory = self._fragments[number], self._memories[number]
        work = list(self._work)
        try:
            self._bind()
            memory.save(fragment.averager)
            self._start(number, self._schedule.step, common)
            fragment.collect()
        except (PeerLost, CorruptPacket) as error:
            _LOG.warning(
                "outer step %d: %s. The exchange is tried again with those who are left", self.outer_steps, error
            )
            if self._bound is not None:
                after = ErrorMemory()
                after.save(fragment.averager)
                self._unfinished = (number, self._version_of(sum(self._exchanges) + 1), after)
            fragment.abandon()
            self._work = work
            self._unbind()
            self._quorum.fail(error)
            return False
        self._quorum.commit()
        fragment.apply(0.0)
        self._exchanges[number] += 1
        self._epoch = self._epoch_of_quorum
        self._quorum.version = self._version_of(sum(self._exchanges))
        self._newcomer, self._contributors = False, self._peers.size
        return True

    def _version_of(self, exchanges: int) -> int:
        """Versions are ordered by progress, and then by the quorum that made it.

        Two workers have the same version only if they were in the same quorum, and so have the same state: if an
        exchange succeeds on one worker and fails on others, who repeat it without this one, the quorum tells the two
        results apart.
        """
        epoch = self._epoch_of_quorum if exchanges > sum(self._exchanges) else self._epoch
        return (exchanges + 1) * _EPOCHS + epoch

    @property
    def _version(self) -> int:
        """That of a worker which has exchanged, or loaded the state of one that has; else 0."""
        exchanges = sum(self._exchanges)
        return self._version_of(exchanges) if exchanges else 0

    def _weight(self, fragment: int, *, between: bool) -> float:
        if self._weighted:
            return super()._weight(fragment, between=between)
        if self._contributors in (0, self._peers.size):
            return 1.0
        return 0.0 if self._newcomer else self._peers.size / self._contributors

    # Members ---------------------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        """If the members have changed, compare everything with them, and connect."""
        assert self._quorum is not None, "after join()"
        members = self._quorum.members
        if self._bound is members:
            return
        self._keep_residuals()
        self._exchange_with(members)
        told = members.gather((self._epoch, self._newcomer, self._exchanges), "the members of the quorum")
        require_same("the exchanges of the run", [repr(exchanges) for _, _, exchanges in told])
        self._epoch_of_quorum = 1 + max(epoch for epoch, _, _ in told)
        self._contributors = sum(not newcomer for _, newcomer, _ in told)
        for number, (fragment, names) in enumerate(zip(self._fragments, self._names(), strict=True)):
            self._past[number] = continued(self._past[number], fragment.averager.metrics())
            fragment.exchange_with(self._averager)
            self._memories[number].restore(fragment.averager)
            fragment.averager.continue_from(self._exchanges[number])
            fragment.averager._prepare(dict(zip(fragment.references, names, strict=True)))
        self._bound = members

    def _keep_residuals(self) -> None:
        """Before averagers are replaced, copy what they have left out, unless their last exchange has failed."""
        if self._bound is not None:
            for fragment, memory in zip(self._fragments, self._memories, strict=True):
                memory.save(fragment.averager)
            self._bound = None

    def _unbind(self) -> None:
        """After a failed exchange: the residuals are those that the memories have from before it."""
        for fragment in self._fragments:
            fragment.averager.close()
        self._bound = None

    def _exchange_with(self, members: Peers) -> None:
        # `Peers.of` takes peers as well as a group.
        self._process_group, self._peers = cast("dist.ProcessGroup", members), members

    # The state that a new worker gets --------------------------------------------------------------------------------

    def _shared_state(self) -> dict[str, Any]:
        """What all workers have in common. Read by another thread, while this one waits for the quorum; the tensors
        themselves until `Quorum.commit`."""
        return {
            "settings": {name: repr(value) for name, value in self._settings().items()},
            "schedule": self._schedule.state(),
            "exchanges": list(self._exchanges),
            "epoch": self._epoch,
            "due": self._due,
            "outer": (float(self.outer_lr), float(self.outer_momentum)),
            "fragments": [
                # A momentum of zeros is not sent.
                (each.reference, each.momentum if has_values(each.momentum) else None)
                for each in self._fragments
            ],
        }

    def _settings(self) -> dict[str, Any]:
        compressor, options, decay = self._compressor
        described = self._description()
        changing = (*(f"the number of {name}" for name in self._schedule.common()), "outer_lr", "outer_momentum")
        mine = {
            name: value
            for name, value in described.items()
            if name not in changing and not name.endswith("of the inner optimizer")
        }
        return {
            "thinwire's version": __version__,
            **rule_of(compressor, options, decay).settings(),
            **mine,
            "outer_lr": self._given_outer[0],
            "outer_momentum": self._given_outer[1],
            "bucket_mb": self._wire["bucket_mb"],
            "max_consecutive_skips": self._wire["max_consecutive_skips"],
            "check_replicas_every": self._wire["check_replicas_every"],
            "the parameters": [
                (name, tuple(p.shape), str(p.dtype))
                for fragment, names in zip(self._fragments, self._names(), strict=True)
                for name, p in zip(names, fragment.params, strict=True)
            ],
        }

    def _take(self, state: dict[str, Any]) -> None:
        """Continue from the state of another worker.

        Raises:
            ValueError: if this worker was made with other settings.
        """
        self._check_shared(state, "the run has")
        self._keep_residuals()
        self._load_shared(state)
        if self._unfinished is not None and self._unfinished[1] == self._version:
            # The exchange that failed here has succeeded there, with what this worker sent.
            number, _, after = self._unfinished
            self._memories[number] = after
        else:
            for memory in self._memories:
                memory.clear()
        self._work = [0] * len(self._work)
        self._due = None if state["due"] is None else tuple(state["due"])
        self._taken, self._newcomer = True, bool(self._version or self._due)

    def _check_shared(self, state: Any, owner: str) -> None:
        theirs = state.get("settings") if isinstance(state, dict) else None
        if not isinstance(theirs, Mapping):
            raise ValueError(f"the state of a worker is {state!r:.80}: expected what ElasticLocalSteps sends")
        own = {name: repr(value) for name, value in self._settings().items()}
        for setting in dict.fromkeys((*own, *theirs)):
            if own.get(setting) != theirs.get(setting):
                raise ValueError(
                    f"this worker has {setting}={own.get(setting, 'missing')}, "
                    f"{owner} {theirs.get(setting, 'missing')}: start it with the settings and the model of the run"
                )
        Schedule.check(state["schedule"])

    def _load_shared(self, state: Mapping[str, Any]) -> None:
        self._exchanges, self._epoch = list(state["exchanges"]), state["epoch"]
        self._schedule.load(state["schedule"])
        self.outer_lr, self.outer_momentum = state["outer"]
        for fragment, (reference, momentum) in zip(self._fragments, state["fragments"], strict=True):
            fragment.reference.copy_(reference)
            fragment.momentum.zero_() if momentum is None else fragment.momentum.copy_(momentum)
            fragment.set_parameters(fragment.references)
            fragment.moved = False

    # Replicas, reading and saving ------------------------------------------------------------------------------------

    def synchronize(self, model: nn.Module | None = None) -> None:
        """Not offered: workers come and go, so there is no point at which all of them would call it. Evaluate with
        `at_reference()`, which needs no other worker, or after a multiple of `every` steps.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "synchronize() of ElasticLocalSteps: no other worker would know of it. Use `with opt.at_reference():`, "
            "which has the values on which all workers agree, and sends nothing"
        )

    def metrics(self) -> LocalMetrics:
        """See `LocalSteps.metrics`. Exchanges that failed count with what they sent."""
        return local_metrics(
            self._schedule.step,
            self._skipped_steps,
            [
                continued(past, fragment.averager.metrics())
                for past, fragment in zip(self._past, self._fragments, strict=True)
            ],
            [fragment.motion for fragment in self._fragments],
            self._peers.size,
        )

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state of the inner optimizer, and under "thinwire" what all workers have in common, as of the last
        exchange. Any worker can load it, in a run of any number of workers.

        Save after a multiple of `every` steps: inner steps since the last exchange are not in it. Neither are
        residuals: a run that resumes begins with none, as a new worker does.
        """
        saved = self.inner.state_dict()
        for group in saved["param_groups"]:
            make_plain(group)
        self._build()
        return {**saved, _OWN: {"elastic": self._shared_state(), "skipped_steps": self._skipped_steps}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin from what `state_dict()` returned, before `join()`. It also sets the parameters.

        It is enough that one worker does: the others get its parameters when they join.

        Raises:
            RuntimeError: after `join()`.
            ValueError: if it is of other settings, or of no ElasticLocalSteps. Nothing has changed then.
        """
        if self._quorum is not None:
            raise RuntimeError("load_state_dict() after join(): the parameters are those of the run. Call it before")
        self.check_state_dict(state_dict)
        self.inner.load_state_dict({name: value for name, value in state_dict.items() if name != _OWN})
        own = state_dict[_OWN]
        self._load_shared(own["elastic"])
        self._skipped_steps = own["skipped_steps"]

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `LocalSteps.check_state_dict`."""
        own = state_dict.get(_OWN) if isinstance(state_dict, dict) else None
        if not isinstance(own, dict) or not {"elastic", "skipped_steps"} <= own.keys():
            raise ValueError("the state dict is not of an ElasticLocalSteps")
        self._build()
        self._check_shared(own["elastic"], "the state dict has")
