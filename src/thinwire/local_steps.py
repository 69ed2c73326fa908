"""`thinwire.LocalSteps`: many steps of any optimizer on each worker, then one compressed outer update."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from thinwire._checks import INT64_MAX, check_fraction, is_integer
from thinwire._torch_compat import scale_passed_to_step, unscales_in_step
from thinwire.averaging.catalogue import rule_of
from thinwire.optimizers.agreement import require_agreement, require_same
from thinwire.optimizers.inputs import check_frozen, make_plain
from thinwire.outer.averager import OuterAverager
from thinwire.outer.buffers import average_buffers
from thinwire.outer.error_reset import StepExchange, check_error_reset, check_worker
from thinwire.outer.fragment import Fragment, OuterStep, divide
from thinwire.outer.inputs import (
    all_finite,
    check_alone,
    check_gradient,
    check_inner,
    check_intervals,
    inner_fields,
)
from thinwire.outer.metrics import LocalMetrics, local_metrics
from thinwire.outer.profiles import profile_of
from thinwire.outer.schedule import Every, Schedule
from thinwire.transport.failures import on_all_ranks
from thinwire.transport.peers import Peers
from thinwire.transport.topology import Choice

_OWN = "thinwire"
"""The entry of a state dict that holds everything but the state of the inner optimizer."""
_ENTRIES = {"rank", "world_size", "work", "fragments", "step_exchange", "parameters"}
"""Of that entry, besides counters."""


@unscales_in_step
class LocalSteps(Optimizer):
    """Local steps with compressed outer updates (DiLoCo): ranks train alone, and exchange how far they have moved every
    `every` steps. On links that are too slow even for one bit per parameter and step.

    A. Douillard, Q. Feng, A. A. Rusu, R. Chhaparia, Y. Donchev, A. Kuncoro, M. Ranzato, A. Szlam, J. Shen: "DiLoCo:
    distributed low-communication training of language models", arXiv 2311.08105, 2023.
    A. Douillard et al.: "Streaming DiLoCo with overlapping communication: towards a distributed free lunch", arXiv
    2501.18512, 2025 (`fragments`, `delay`, `mix`).

    Example::

        inner = torch.optim.AdamW(model.parameters(), lr=4e-4)     # the module itself, not in DDP
        opt = thinwire.LocalSteps(inner, every=30, compressor="int4")
        ...
        loss.backward(); opt.step(); opt.zero_grad()               # every 30th step exchanges

    With θ the parameters of a worker and θ_ref where all workers last agreed, after `every` inner steps::

        Δ = θ_ref - θ
        Δ̄ = the mean of Δ over all workers, through the compressor: e ← decay·e + Δ, send C(e), e ← e - C(e)
        m ← outer_momentum·m + Δ̄
        θ_ref ← θ_ref - outer_lr·(Δ̄ + outer_momentum·m)
        θ ← θ_ref

    All ranks have the same θ_ref, to the bit. The state of the inner optimizer stays where it is and is never sent.

    Relatives, by their settings: `outer_lr=1, outer_momentum=0, compressor="none"` is local SGD (S. U. Stich: "Local
    SGD converges fast and communicates little", ICLR 2019), with any inner optimizer. The same with `"topk"`, `"qsgd"`
    or `"sign"` is Qsparse-local-SGD (D. Basu, D. Data, C. Karakus, S. Diggavi, NeurIPS 2019), whose error memory this
    is. With `"chunked_topk"`, `residual_decay=0.95` and the outer settings of local SGD it is SparseLoCo, and with
    `thinwire.MuonAdamW` as the inner optimizer MuLoCo: see `from_profile`.

    With `error_reset=True` there is no error memory: what a message leaves out stays in the worker's parameters,
    θ ← θ_ref - (Δ - C(Δ)), and is part of its next Δ. With a `step_compressor` C₂ every inner step is exchanged too. If
    it has moved by p, then θ_ref ← θ_ref - A and θ ← θ + C₂(p) - A with A = the mean of C₂(p). With both, and the outer
    settings of local SGD, it is CSER (C. Xie, S. Zheng, O. Koyejo, I. Gupta, M. Li, H. Lin: "CSER:
    communication-efficient SGD with error reset", NeurIPS 2020), for any inner optimizer: its "local models" are θ, its
    errors θ - θ_ref. Workers then always differ; `at_reference()` has the values to evaluate, and `synchronize()` makes
    workers equal, which leaves what was not sent in a residual until the next exchange.

    `opt` behaves like `inner`: `param_groups`, `state`, `zero_grad()` and hyper-parameters are those of `inner`, and
    learning rate schedulers on either count inner steps. A GradScaler works as before: each worker has its own scale
    and skips its own steps. If a gradient is not finite, the worker skips that inner step. If Δ is not finite on any
    rank, all ranks return to θ_ref together; compression then leaves no infinity behind.

    Buffers, such as the statistics of BatchNorm, stay local. `synchronize(model)` averages them, before you evaluate.

    Parameters in bfloat16 or float16 have a θ_ref in float32. Ranks of a node that `topology` or `mesh` names form a
    worker: Δ is averaged densely among them, and compressed between nodes. Use DistributedDataParallel over the ranks
    of each node if they should take their inner steps together.

    Memory: θ_ref, momentum and Δ of 4 bytes per parameter each (with fragments, Δ of the largest only; without momentum
    none for it), and the residuals of the compressor. With a `step_compressor` 4 bytes more, and its residuals.

    When not to use it: if the network is fast enough for an exchange per step (`thinwire.compress`, `thinwire.Birder`),
    which needs fewer tokens for the same loss; in runs of a few hundred steps, in which there are only a few outer
    steps; if ranks have very different data, whose local optima differ.

    Differences from the papers: Δ is compressed in both directions, with error memory at workers and owners. Fragments
    are balanced by size over the list of parameters, because an optimizer knows no layers. CSER averages what was sent
    exactly; here the average may be compressed, and its owner keeps what that leaves out. An inner step that is not
    finite on some rank is undone on all of them.

    Args:
        inner: the optimizer of this worker: any torch.optim.Optimizer over float parameters of the unwrapped module.
        every: the number of inner steps per outer step; or a function from the number of outer steps so far to it,
            equal on all ranks; or a list of numbers, one for each rank, equal on all ranks: a slow worker takes fewer
            inner steps, so that nobody waits for it. Use `weighted` with it, and give the ranks of a node the same.
        compressor: the name of the compressor, as in `thinwire.compress`; "none" is the dense exchange of DiLoCo.
        outer_lr: the outer learning rate. May be assigned later, on all ranks.
        outer_momentum: the outer Nesterov momentum, in [0, 1). May be assigned later, on all ranks.
        fragments: exchange the model in this many parts, spread over the interval. The peak rate on the link falls by
            this factor.
        delay: apply an exchange this many inner steps after it has begun, while inner steps go on.
        mix: with `delay`, keep this share of the worker's own parameters, in [0, 1): θ ← mix·θ + (1 - mix)·θ_ref.
            Otherwise what a worker learned during the delay is lost. θ_ref stays equal on all ranks.
        weighted: weigh the update of each rank by the work that it has counted with `count()`, for workers with unequal
            batches, or without data in some steps. It costs a small message per exchange, before it begins.
        clip_to_median: shorten the update of a rank to the median of the norms of all ranks that have moved, before it
            is compressed: Δ ← min(1, median/‖Δ‖)·Δ. For workers whose updates may be far too long, because of their
            data or their hardware; a worker that sends wrong bytes on purpose is not stopped by it. It costs a small
            message per exchange, before it begins.
        residual_decay: what residuals are multiplied by before each exchange, in [0, 1].
        error_reset: True to keep what messages leave out in the parameters of the worker, as CSER does. For compressors
            with error feedback and parameters in float32; not with `delay`, `mix`, `weighted`, `clip_to_median`,
            `residual_decay`, or workers of several ranks.
        step_compressor: with `error_reset`, the name of the compressor of every inner step. None: exchange every
            `every` steps only. Not with an `every` for each rank.
        step_options: its options, such as `{"ratio": 0.01}`.
        process_group, topology, mesh, node_dtype, bucket_mb: as in `thinwire.compress`.
        max_consecutive_skips: raise TooManySkips after this many exchanges in a row in which an update was not finite.
            None: never.
        check_replicas_every: compare a hash of θ_ref across all ranks every this many exchanges; 0 for never.
        **options: options of the compressor, such as `block=32` of "int4".

    Raises:
        TypeError: if `inner` is not such an optimizer; for an unknown option of the compressor.
        ValueError: for an unknown compressor, or an argument out of range. The first `step()` raises on every rank if
            ranks disagree, or if something else averages the gradients.
    """

    def __init__(
        self,
        inner: Optimizer,
        every: Every = 30,
        compressor: str = "int4",
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
        weighted: bool = False,
        clip_to_median: bool = False,
        residual_decay: float = 1.0,
        error_reset: bool = False,
        step_compressor: str | None = None,
        step_options: Mapping[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        topology: Choice = "auto",
        mesh: DeviceMesh | None = None,
        node_dtype: torch.dtype = torch.float32,
        bucket_mb: float | None = None,
        max_consecutive_skips: int | None = 10,
        check_replicas_every: int = 10,
        **options: Any,
    ) -> None:
        if isinstance(inner, LocalSteps):
            raise TypeError("inner is thinwire.LocalSteps: expected an optimizer that steps alone")
        check_inner(inner)
        check_fraction("mix", mix, below=1.0)
        self.inner = inner
        """The optimizer of this worker."""
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self._check_outer()
        self._mix = mix
        if not isinstance(weighted, bool):
            raise ValueError(f"weighted={weighted!r}: expected True or False")
        if not isinstance(clip_to_median, bool):
            raise ValueError(f"clip_to_median={clip_to_median!r}: expected True or False")
        self._weighted = weighted
        self._clip_to_median = clip_to_median
        self._schedule = Schedule(every, fragments, delay)
        self._work = [0] * fragments
        """Of each fragment, the work that this rank has counted since its last exchange."""
        self._compressor: tuple[str, Mapping[str, Any], float] = (compressor, options, residual_decay)
        rule_of(*self._compressor)  # raises for a wrong argument
        check_error_reset(
            error_reset,
            (compressor, options),
            step_compressor,
            step_options,
            delay=delay,
            mix=mix,
            weighted=weighted,
            clip_to_median=clip_to_median,
            residual_decay=residual_decay,
        )
        if step_compressor is not None and self._schedule.of_each_rank is not None:
            raise ValueError(
                f"every={every!r} with step_compressor={step_compressor!r}: expected one number for all ranks, because "
                "every inner step is exchanged"
            )
        self._error_reset = error_reset
        self._step_compressor = (step_compressor, dict(step_options or {})) if step_compressor is not None else None
        self._process_group = process_group
        self._wire: dict[str, Any] = {
            "topology": topology,
            "mesh": mesh,
            "node_dtype": node_dtype,
            "bucket_mb": bucket_mb,
            "max_consecutive_skips": max_consecutive_skips,
            "check_replicas_every": check_replicas_every,
        }
        self._fragments: list[Fragment] = []
        """Made before the first step, when the parameters have their values, devices and dtypes."""
        self._step_exchange: StepExchange | None = None
        """With a `step_compressor`, made together with the fragments."""
        self._peers = Peers(None, 0, 1)
        self._agreed = False
        """Whether all ranks have compared their settings since the start, or since a state was loaded."""
        self._closed = False
        self._skipped_steps = 0
        # Not Optimizer.__init__, which would make groups and state of its own: those of `inner` are used.
        Optimizer.__setstate__(self, {"defaults": dict(inner.defaults)})

    @classmethod
    def from_profile(cls, profile: str, inner: Optimizer, **settings: Any) -> LocalSteps:
        """Local steps with the settings of a paper. Example: `LocalSteps.from_profile("sparse-loco", inner, every=30)`.

        | profile | compressor | outer lr, momentum | |
        |---|---|---|---|
        | "diloco" | none | 0.7, 0.9 | dense updates (Douillard et al., 2023) |
        | "diloco-int4" | int4 | 0.7, 0.9 | 4.25 bits per parameter and outer step |
        | "streaming-int4" | int4 | 0.7, 0.9 | fragments=5, delay=5, mix=0.5; needs `every` of at least 25 |
        | "sign" | sign | 0.7, 0.9 | 1 bit |
        | "cser" | randomk, 10 % and 1 % in every step | 1, 0 | `error_reset`: 0.32 bits per inner step, and 3.2 per \
          outer step (Xie et al., 2020; the ratios are ours) |
        | "sparse-loco" | chunked_topk, k=64, union=True, residual_decay=0.95, clip_to_median=True | 1, 0 | 0.23 bits \
          up, n times as many down (Sarfi et al.: "Communication efficient LLM pre-training with SparseLoCo", arXiv \
          2508.15706, 2025; norms are limited to the median in its authors' runs over the internet) |
        | "muloco" | int4 | 0.7, 0.6 | give it a `thinwire.MuonAdamW` (Thérien et al.: "MuLoCo: Muon is a practical \
          inner optimizer for DiLoCo", arXiv 2505.23725, 2025) |

        DeMo exchanges in every step and is no profile: `thinwire.compress(model, "dct_topk", residual_decay=0.999)`
        with `thinwire.SignSGD`.

        Differences from SparseLoCo: chunks of 4,096 neighbours in the flat space, where the authors have 64 x 64 of
        each matrix. Values have two magnitudes, whose scale minimizes the error of the chunk. The answer has two bits
        per value again, with a residual at its owner; all entries of all workers fit into it. With `union=False` it has
        k entries, and what a worker receives does not grow with n. Norms are those of whole updates before compression,
        not of each compressed tensor.

        Differences from MuLoCo: int4 with residuals, as `"diloco-int4"`. The authors train without compression, and
        with 2 and 4 bits: `compressor="none"`, or `"int2"`. Their sample configurations have an outer rate of 0.9 and a
        momentum of 0.8 for many workers; 0.6 suits few workers and short runs.

        Args:
            profile: its name.
            inner: see the class.
            **settings: arguments of the class, which take the place of those of the profile.

        Raises:
            TypeError, ValueError: as the class; for an unknown profile.
        """
        return cls(inner, **{**profile_of(profile), **settings})

    # As torch.optim --------------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the inner optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the inner optimizer."""
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the inner optimizer, before the first step.

        Raises:
            RuntimeError: after it.
        """
        if self._fragments:
            raise RuntimeError(
                "add_param_group after the first step: all ranks have already agreed on a layout. Give the inner "
                "optimizer all parameters when it is made, and then freeze some of them with requires_grad_(False)"
            )
        self.inner.add_param_group(param_group)
        try:
            check_inner(self.inner)
        except (TypeError, ValueError):
            self.inner.param_groups.pop()
            raise

    def __repr__(self) -> str:
        name, options, _ = self._compressor
        given = "".join(f", {option}={value!r}" for option, value in options.items())
        return f"LocalSteps(every={self._schedule.every!r}, compressor={name!r}{given}, inner={self.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "LocalSteps has threads and process groups, which cannot be copied or pickled: save state_dict(), and load "
            "it into a new one"
        )

    # A step ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one inner step. Every `every` calls, exchange with all ranks and take an outer step.

        All ranks call it equally often; if `every` has a number for each rank, then as often as that per outer step.

        Args:
            closure: re-evaluates the model and returns the loss, as in torch.optim. The inner optimizer calls it, and
                gradients are then not checked.

        Raises:
            RuntimeError: on every rank, if ranks disagree, or if something else averages gradients between them.
            TooManySkips, ReplicasDiffer, PeerLost, CorruptPacket: as `thinwire.Birder`.
        """
        self._prepare()
        if self._step_exchange is not None:
            self._step_exchange.begin()
        loss = self._inner_step() if closure is None else self.inner.step(closure)
        fragment, common = self._schedule.advance()
        step = self._schedule.step
        for each in self._fragments:
            each.moved = True
            if each.due is not None and each.due <= step:
                each.apply(self._mix)
        if self._step_exchange is not None:
            self._step_exchange.exchange(step)
        if fragment is not None:
            self._exchange(fragment, common)
        return loss

    def _exchange(self, fragment: int, common: Mapping[str, int]) -> None:
        """Exchange a fragment after the inner step that was just taken."""
        self._start(fragment, self._schedule.step + self._schedule.delay, common)
        if not self._schedule.delay:
            self._fragments[fragment].apply(self._mix, reset_error=self._error_reset)

    def _inner_step(self) -> None:
        gradients = [p.grad for p in self._params() if p.grad is not None]
        scale = scale_passed_to_step(self)
        if scale is not None:
            inverse = 1.0 / float(scale)
            for grad in gradients:
                grad.mul_(inverse)
        if all_finite(gradients):
            self.inner.step()
        else:
            self._skipped_steps += 1

    def count(self, work: int) -> None:
        """Count work of this rank for `weighted=True`: the tokens or examples of a batch. Call it once per batch.

        A rank that has no data in a step calls `step()` all the same, without gradients, and counts nothing.

        Raises:
            RuntimeError: without `weighted=True`.
            ValueError: if it is not a number of at least 0.
        """
        if not self._weighted:
            raise RuntimeError("count() of a LocalSteps that does not weigh updates: make it with weighted=True")
        if not is_integer(work, 0, INT64_MAX):
            raise ValueError(f"work={work!r}: expected a number of tokens or examples, an integer of at least 0")
        self._work = [before + work for before in self._work]

    def _weight(self, fragment: int, *, between: bool) -> float:
        """The weight of this rank's update in an exchange that begins. All ranks call it.

        Args:
            fragment: what is exchanged.
            between: whether `synchronize()` asks for it. The fragment may have been exchanged after the last step, so
                that no work has been counted since: all ranks then weigh the same.

        Raises:
            RuntimeError: on every rank, if none of them has counted any work.
        """
        if not self._weighted:
            return 1.0
        own, self._work[fragment] = self._work[fragment], 0
        of_ranks = self._peers.gather_integer(own, "the work of all ranks", self._schedule.step)
        if not any(of_ranks):
            if between:
                return 1.0
            raise RuntimeError(
                "weighted=True, but no rank has counted work since the last exchange: call count(tokens) for each batch"
            )
        return len(of_ranks) * own / sum(of_ranks)

    def _start(self, number: int, due: int, common: Mapping[str, int], *, between: bool = False) -> None:
        """Begin the exchange of a fragment. All ranks call it. For `between` see `_weight`."""
        fragment, outer = self._fragments[number], self._outer_step()
        weight = self._weight(number, between=between)
        if self._clip_to_median:
            weight *= self._clipping(fragment)
        fragment.start(due, common, outer, weight)

    def _clipping(self, fragment: Fragment) -> float:
        """What makes ‖Δ‖ of this rank at most the median of all ranks that have moved. All ranks call it."""
        norm = math.sqrt(fragment.measure())
        norms = self._peers.gather_float(norm, "the norms of the updates of all ranks", self._schedule.step)
        moved = [each for each in norms if 0 < each < math.inf]
        # Without a finite norm, all ranks drop the exchange.
        return min(1.0, median(moved) / norm) if norm in moved else 1.0

    def _params(self) -> list[Tensor]:
        return [p for group in self.inner.param_groups for p in group["params"]]

    def _outer_step(self) -> OuterStep:
        self._check_outer()
        return OuterStep(float(self.outer_lr), float(self.outer_momentum))

    def _check_outer(self) -> None:
        check_fraction("outer_lr", self.outer_lr, least=False)
        check_fraction("outer_momentum", self.outer_momentum, below=1.0)

    # Before the first step -------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Before the first step, compare all settings with all ranks, and connect."""
        if self._agreed:
            if len(self._params()) != self._count:
                raise RuntimeError(
                    "the inner optimizer has other parameters than in the first step: all ranks have already agreed on "
                    "a layout. Give it all parameters when it is made"
                )
            check_frozen(self._frozen)
            return
        if self._closed:
            raise RuntimeError("this LocalSteps is closed: make a new one, and load the state_dict() of this one")
        self._peers = peers = Peers.of(self._process_group)
        self._schedule.rank = peers.rank
        on_all_ranks(peers, self._check_first)
        require_agreement(peers, self._description())
        if self._schedule.step == 0:
            for fragment in self._fragments:
                fragment.take_references()
        for fragment, names in zip(self._fragments, self._names(), strict=True):
            fragment.averager._prepare(dict(zip(fragment.references, names, strict=True)))
        if self._step_exchange is not None:
            self._step_exchange.averager._prepare(
                {
                    reference: name
                    for fragment, names in zip(self._fragments, self._names(), strict=True)
                    for reference, name in zip(fragment.references, names, strict=True)
                }
            )
        self._agreed = True

    def _check_first(self) -> None:
        self._build()
        params = [p for fragment in self._fragments for p in fragment.params]
        topology = self._fragments[0].averager._topology
        if self._error_reset:
            check_worker(params, topology.slices)
        check_alone(params, self._peers, topology)
        check_intervals(self._schedule.of_each_rank, self._peers, topology)
        for p in params:
            check_gradient(p)
        self._schedule.length  # noqa: B018 - raises if `every` returns something else than a length

    def _build(self) -> None:
        """Make the fragments, from the parameters as they are now."""
        held = self._params()
        forms = [(p.shape, p.dtype, p.device, p.requires_grad) for p in held]
        if self._fragments and (self._schedule.step or forms == self._forms):
            return
        check_inner(self.inner)
        self._discard()
        trainable = [p for p in held if p.requires_grad]
        self._frozen = [p for p in held if not p.requires_grad]
        devices = sorted({str(p.device) for p in trainable})
        if len(devices) != 1:
            raise ValueError(f"parameters on devices {devices}: LocalSteps needs trainable ones, all on one device")
        parts = [[trainable[i] for i in indices] for indices in divide(trainable, self._schedule.fragments)]
        sizes = [sum(p.numel() for p in part) for part in parts]
        largest = sum(sizes) if self._step_compressor is not None else max(sizes)
        workspace = torch.zeros(largest, dtype=torch.float32, device=devices[0])
        self._fragments = [Fragment(part, self._averager, workspace) for part in parts]
        if self._step_compressor is not None:
            name, options = self._step_compressor
            make = functools.partial(self._averager, name=name, **options)
            self._step_exchange = StepExchange(self._fragments, make, workspace)
        self._count, self._forms = len(held), forms

    def _first_averager(self) -> OuterAverager:
        """What connects this rank to the others, for checkpoints. All ranks call it."""
        self._build()
        return self._fragments[0].averager

    def _discard(self) -> None:
        for averager in self._averagers():
            averager.close()
        self._fragments, self._step_exchange = [], None

    def _averager(self, references: Sequence[Tensor], name: str = "", **options: Any) -> OuterAverager:
        rule = rule_of(name, options) if name else rule_of(*self._compressor)
        return OuterAverager(references, rule, process_group=self._process_group, **self._wire)

    def _averagers(self) -> list[OuterAverager]:
        of_steps = [] if self._step_exchange is None else [self._step_exchange.averager]
        return [*(fragment.averager for fragment in self._fragments), *of_steps]

    def _names(self) -> list[list[str]]:
        """The names of the parameters of each fragment: their own, or their places in the optimizer."""
        known: dict[int, str] = {}
        for group in self.inner.param_groups:
            for place, p in enumerate(group["params"], len(known)):
                known[id(p)] = str(place)
            known |= {id(p): name for p, name in zip(group["params"], group.get("param_names", []), strict=False)}
        return [[known[id(p)] for p in fragment.params] for fragment in self._fragments]

    def _description(self) -> dict[str, Any]:
        schedule = self._schedule
        return {
            "every": "a function" if callable(schedule.every) else schedule.every,
            **{f"the number of {name}": value for name, value in schedule.common().items()},
            "fragments": schedule.fragments,
            "delay": schedule.delay,
            "mix": self._mix,
            "weighted": self._weighted,
            "clip_to_median": self._clip_to_median,
            "error_reset": self._error_reset,
            "step_compressor": self._step_compressor and self._step_compressor[0],
            "outer_lr": float(self.outer_lr),
            "outer_momentum": float(self.outer_momentum),
            "the class of the inner optimizer": type(self.inner).__name__,
            **dict(inner_fields(self.inner)),
        }

    # Replicas --------------------------------------------------------------------------------------------------------

    @property
    def is_synchronized(self) -> bool:
        """Whether the parameters are equal on all ranks: directly after an outer step or `synchronize()`."""
        return not any(fragment.moved for fragment in self._fragments)

    @torch.no_grad()
    def synchronize(self, model: nn.Module | None = None) -> None:
        """Make all replicas equal now, before you evaluate or save a model of all ranks. Call it on all ranks.

        Directly after an outer step they are equal, unless there are several fragments or a `delay`, and nothing is
        sent. Otherwise all fragments take an outer step now, and a new interval begins: evaluate after a multiple of
        `every` steps, and it costs nothing.

        Args:
            model: average its buffers too, such as the statistics of BatchNorm: the mean of floating-point buffers, in
                float64, and the values of rank 0 for all others.

        Raises:
            RuntimeError: on all ranks, if some of them did not call it, or have taken other numbers of steps.
        """
        peers = Peers.of(self._process_group)
        unequal = self._schedule.of_each_rank is not None
        done = self._schedule.outer_step if unequal else self._schedule.step
        seen = peers.gather((done, self.is_synchronized, model is None), "synchronize() of LocalSteps")
        kind = "outer" if unequal else "inner"
        require_same(f"the number of {kind} steps at synchronize()", [repr(step) for step, _, _ in seen])
        require_same("whether replicas are equal at synchronize()", [repr(equal) for _, equal, _ in seen])
        require_same("whether synchronize() has no model", [repr(without) for _, _, without in seen])
        if not self.is_synchronized:
            self._prepare()
            for fragment in self._fragments:
                if fragment.due is not None:
                    fragment.apply(self._mix)
            common = self._schedule.common()
            for number, fragment in enumerate(self._fragments):
                self._start(number, self._schedule.step, common, between=True)
                fragment.apply(0.0)
            self._schedule.restart()
        if model is not None:
            average_buffers(model, peers)

    @contextmanager
    def at_reference(self) -> Iterator[None]:
        """Inside of the block, the parameters have the values of θ_ref, on which all ranks agree; then those of this
        rank again. Nothing is sent, and training goes on as if nothing had happened: to evaluate at any time, on any
        rank. Example::

            with opt.at_reference():
                evaluate(model)
        """
        own = [(p, p.detach().clone()) for fragment in self._fragments for p in fragment.params]
        try:
            with torch.no_grad():
                for fragment in self._fragments:
                    fragment.set_parameters(fragment.references)
            yield
        finally:
            with torch.no_grad():
                for p, value in own:
                    p.copy_(value)

    def close(self) -> None:
        """End threads and connections. It can take no more steps; its state can still be read."""
        self._closed = True
        self._agreed = False
        for averager in self._averagers():
            averager.close()

    # Reading ---------------------------------------------------------------------------------------------------------

    @property
    def outer_steps(self) -> int:
        """The number of intervals so far."""
        return self._schedule.outer_step

    def metrics(self) -> LocalMetrics:
        """The bytes, times and norms of this rank since the first step."""
        return local_metrics(
            self._schedule.step,
            self._skipped_steps,
            [fragment.averager.metrics() for fragment in self._fragments],
            [fragment.motion for fragment in self._fragments],
            self._peers.size,
            of_steps=None if self._step_exchange is None else self._step_exchange.averager.metrics(),
        )

    # Saving ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state of the inner optimizer, as its own `state_dict()`, and under "thinwire" everything else: θ_ref,
        momentum, residuals, counters, an exchange under way and, between outer steps, the parameters of this rank.

        Each rank has its own, so every rank must save: in its own file, or with `thinwire.checkpoint`. If an exchange
        is under way, this waits for it: call it on all ranks after the same step.
        """
        saved = self.inner.state_dict()
        for group in saved["param_groups"]:
            make_plain(group)
        own: dict[str, Any] = {
            **self._schedule.state(),
            "rank": self._peers.rank,
            "world_size": self._peers.size,
            "outer_lr": float(self.outer_lr),
            "outer_momentum": float(self.outer_momentum),
            "skipped_steps": self._skipped_steps,
            "work": list(self._work),
            "fragments": [],
            "step_exchange": None,
            "parameters": None,
        }
        if self._schedule.step:
            for fragment in self._fragments:
                fragment.collect()
            own["fragments"] = [fragment.state() for fragment in self._fragments]
            own["step_exchange"] = None if self._step_exchange is None else self._step_exchange.state()
            if not self.is_synchronized:
                own["parameters"] = [[p.detach() for p in fragment.params] for fragment in self._fragments]
        return {**saved, _OWN: own}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict()` returned on the same rank of a run with as many ranks. Call it on all
        ranks. It also sets the parameters to those of the saved rank, which differ between outer steps.

        Raises:
            TypeError: if it is not a dict.
            ValueError: if it is of another rank, number of ranks, model or compressor, or of no LocalSteps. Nothing has
                changed then.
        """
        self.check_state_dict(state_dict)
        own = state_dict[_OWN]
        self.inner.load_state_dict({name: value for name, value in state_dict.items() if name != _OWN})
        self._schedule.load(own)
        self.outer_lr, self.outer_momentum = own["outer_lr"], own["outer_momentum"]
        self._skipped_steps = own["skipped_steps"]
        self._work = [int(work) for work in own["work"]]
        # Other ranks may have loaded another state, or none: agree again.
        self._agreed = False
        if not own["step"]:
            self._discard()  # the first step makes new ones
        for number, (fragment, saved) in enumerate(zip(self._fragments, own["fragments"], strict=False)):
            fragment.load(saved)
            fragment.set_parameters(fragment.references if own["parameters"] is None else own["parameters"][number])
        if self._step_exchange is not None:
            self._step_exchange.load(own["step_exchange"])

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Run all checks of `load_state_dict`, and change nothing.

        Raises:
            TypeError, ValueError: as `load_state_dict`.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(f"state_dict is {type(state_dict).__name__}, expected a dict, as state_dict() returns it")
        own = state_dict.get(_OWN)
        if not isinstance(own, dict) or not own.keys() >= _ENTRIES:
            raise ValueError(
                f"the state dict has {sorted(map(str, state_dict))}: expected that of a LocalSteps, with {_OWN!r}. To "
                "begin local steps from the state of a plain optimizer, load it into the inner optimizer"
            )
        Schedule.check(own)
        if len(own["work"]) != self._schedule.fragments:
            raise ValueError(
                f"the state dict has {len(own['work'])} fragments, this LocalSteps {self._schedule.fragments}: "
                "expected the same `fragments`"
            )
        if not own["step"]:
            return
        peers = Peers.of(self._process_group)
        if (own["rank"], own["world_size"]) != (peers.rank, peers.size):
            raise ValueError(
                f"the state dict is of rank {own['rank']} of {own['world_size']}, this is rank {peers.rank} of "
                f"{peers.size}: each rank has its own parameters, inner state and residuals. Save the state dict of "
                "every rank, or use thinwire.checkpoint"
            )
        self._peers = peers
        self._build()
        for number, (fragment, saved) in enumerate(zip(self._fragments, own["fragments"], strict=True)):
            fragment.check(saved)
            if own["parameters"] is not None:
                _check_parameters(fragment.params, own["parameters"][number])
        if (own["step_exchange"] is None) != (self._step_exchange is None):
            raise ValueError(
                f"the state dict is of a LocalSteps {'without' if own['step_exchange'] is None else 'with'} a "
                "step_compressor, and this one is not: expected the same arguments"
            )
        if self._step_exchange is not None:
            self._step_exchange.check(own["step_exchange"])


def _check_parameters(params: Sequence[Tensor], saved: Any) -> None:
    described = [(tuple(p.shape), p.dtype) for p in params]
    found = [(tuple(p.shape), p.dtype) for p in saved if isinstance(p, Tensor)] if isinstance(saved, list) else saved
    if found != described:
        raise ValueError(f"the state dict has parameters {found!r:.200}, this model has {described!r:.200}")
