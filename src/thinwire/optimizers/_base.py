"""The one file that orders the stages of a step.

    gradients → bucket → [mean over the node] → local rule → compressor → exchange → apply → metrics

A paper is a subclass. It says what it keeps and which compressors it uses (`_declare`), which of them this step uses
(`_channel_now`), what it sends (`_local`), and what everybody does with the answer (`_apply`). When and by whom these
are called is decided here and is the same for all: by `step()`, or, for a model given to `thinwire.attach`, as soon as
backward has a gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import ParamsT

from thinwire._torch_compat import unscales_in_step
from thinwire.kernels import ops
from thinwire.kernels.modes import Scale
from thinwire.metrics import Meter, Metrics
from thinwire.optimizers import _state_dict
from thinwire.optimizers._agreement import describe, require_agreement
from thinwire.optimizers._inputs import LOW_PRECISION, check_parameters, form_of, gradient_of, make_plain, refuse_thawed
from thinwire.optimizers._options import spelled_out
from thinwire.optimizers._paper import LOCAL
from thinwire.optimizers._safety import ReplicaCheck, Skips
from thinwire.optimizers._unseen import UnseenSteps
from thinwire.transport import packet
from thinwire.transport.buffers import Part
from thinwire.transport.device_node import DeviceNode
from thinwire.transport.exchange import Job
from thinwire.transport.lanes import AnyNode, Channel, LaneTransport, Link, Presence, Transport
from thinwire.transport.layout import Layout, bucket_elements, is_dense
from thinwire.transport.memory import HOST
from thinwire.transport.node import Node
from thinwire.transport.peers import Peers
from thinwire.transport.side_stream import Side, StreamTransport
from thinwire.transport.topology import Choice, choose


@unscales_in_step
class WireOptimizer(UnseenSteps):
    """What all of thinwire's optimizers share; see the subclasses for use.

    The phases of `step()`:

    1. encode the gradients that backward has not encoded already; a bucket whose last parameter is encoded goes to
       the lanes, which exchange buckets in order while the next are being encoded. In a hierarchical topology gradients
       are only staged here, and a lane encodes what comes out of the node's mean;
    2. wait for the lanes;
    3. if any gradient on any rank was not finite, stop here, on all ranks;
    4. apply the answers.
    """

    _built = False

    def __init_subclass__(cls) -> None:
        cls.__signature__ = spelled_out(cls.__init__, WireOptimizer.__init__)

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        process_group: dist.ProcessGroup | None = None,
        topology: Choice = "auto",
        mesh: DeviceMesh | None = None,
        node_dtype: torch.dtype = torch.float32,
        bucket_mb: float | None = None,
        max_consecutive_skips: int | None = 100,
        check_replicas_every: int = 100,
    ) -> None:
        if bucket_mb is not None and not 0 < bucket_mb < math.inf:
            raise ValueError(f"bucket_mb={bucket_mb!r}: expected a positive number, in megabytes of fp32 gradient")
        if node_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"node_dtype={node_dtype!r}: expected torch.float32 or torch.bfloat16")
        self._bucket_mb = bucket_mb
        self._node_dtype = node_dtype
        self._skips = Skips(max_consecutive_skips)
        self._replica_check = ReplicaCheck(check_replicas_every)
        self._peers = Peers.of(process_group)
        self._topology = choose(topology, mesh, self._peers)
        self._meter = Meter()
        self._step_count = torch.zeros((), dtype=torch.int64, device=HOST)
        self._transport: Transport | None = None
        """Opened when all ranks have agreed, at the first step or by `attach`."""
        self._repeats = False
        self._names: dict[Tensor, str] = {}
        self._after_step: list[Callable[[], None]] = []
        """Whom to tell of every step, also one that ends in an error about many of them."""
        self._loading: list[tuple[Tensor, Tensor]] = []
        """Pairs of a tensor that is kept and what load_state_dict is about to copy into it."""
        self._agreed = False
        """Whether all ranks have ever agreed on the layout."""
        self._closed = False
        self._at_close: list[Callable[[], None]] = []
        """What else ends with this optimizer."""
        # Not self.defaults, to which torch adds entries of its own.
        self._hyperparameters = frozenset(defaults)
        super().__init__(params, defaults)
        self._build()
        _state_dict.install(self)

    def _settings_text(self) -> str:
        """The arguments that decide the bits of a run, for people to read."""
        settings = self._settings()
        if self._topology.slices > 1:
            settings["node_dtype"] = self._node_dtype
        return ", ".join(f"{name}={value}" for name, value in settings.items())

    # Layout and state, made at construction --------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in torch.optim; possible until the first step or `attach`."""
        if self._agreed or self._step_count > 0:
            raise RuntimeError(
                "add_param_group after the first step or attach: all ranks have agreed on a layout by now. Give the "
                "optimizer all parameters when it is made, and freeze with requires_grad_(False) what shall wait"
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            make_plain(group)
            self._check_group(group)
            check_parameters(group["params"])
            _state_dict.label(self, group)
            if self._built:
                self._build()
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _build(self) -> None:
        # A parameter that is frozen now takes no room on the wire. Freezing one later is fine: it just has no gradient.
        held = [(p, i) for i, group in enumerate(self.param_groups) for p in group["params"] if p.requires_grad]
        self._frozen = [p for group in self.param_groups for p in group["params"] if not p.requires_grad]
        devices = {p.device for p, _ in held}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"parameters on devices {names}: an optimizer needs all its parameters on one device")
        device = devices.pop() if devices else torch.device("cpu")
        numels = [p.numel() for p, _ in held]
        topology = self._topology
        layout = Layout(
            numels,
            topology.workers,
            bucket_elements(self._bucket_mb, sum(numels)),
            slices=topology.slices,
            own_slice=topology.own_slice,
            device=device,
        )
        self._peers.refuse_group_without(device)
        self._side = Side.of(layout)
        kernels = ops.backend(device)
        self._kernels = kernels if self._side is None else self._side.bind(kernels)
        self._flat_params: list[Tensor] = [held[slot.index][0] for slot in layout.slots]
        """The parameters that take part, in the order of the flat space."""
        self._group_index = [held[slot.index][1] for slot in layout.slots]
        self._layout = layout
        compressors, self._kept = self._declare(layout)
        self._channels = {
            name: Channel(compressor, layout, topology, number, local=name == LOCAL)
            for number, (name, compressor) in enumerate(compressors.items())
        }
        self._kept_of, self._shown_of = [], []
        for position, p in enumerate(self._flat_params):
            state = {"step": self._step_count, **self._kept.of(layout, topology.node, position, p)}
            if p.dtype in LOW_PRECISION:
                order = torch.preserve_format if is_dense(p) else torch.contiguous_format
                state["master"] = torch.empty_like(p, dtype=torch.float32, memory_format=order).copy_(p.detach())
            self._kept_of.append(state)
        _state_dict.show(self)
        self._forms = [form_of(p) for p in self._flat_params]
        self._built = True
        self._begin_step()

    def _group_of(self, position: int) -> dict[str, Any]:
        # Looked up each time: load_state_dict replaces the groups.
        return self.param_groups[self._group_index[position]]

    def _prepare(self, names: dict[Tensor, str] | None = None) -> None:
        """Before the first exchange: agree with everybody on everything, then open the lanes.

        Called by the first `step()` after construction or `load_state_dict()`, or by `attach`, which knows the
        parameters' names.

        Raises:
            RuntimeError: on every rank, when ranks disagree; after `close()`.
            ValueError: on every rank, when the ranks of nodes cannot be told, or are unequally many.
        """
        if self._transport is not None and names is None:
            return
        if self._closed:
            raise RuntimeError(
                f"this {type(self).__name__} is closed: make a new one, and load its state_dict(). A model that was "
                "attached needs a new DistributedDataParallel around its module"
            )
        self._peers.refuse_late_group()
        self._names = names or self._names
        _state_dict.refuse_changed(self, thoroughly=True)
        name = require_agreement(self._peers, describe(self, self._names))
        self._agreed = True
        if self._topology.complaint is not None:
            raise ValueError(self._topology.complaint)
        if self._transport is None:
            link = self._join(name)
            self._transport = LaneTransport(link) if self._side is None else StreamTransport(link, self._side)

    def _join(self, name: str) -> Link:
        """Connect this rank to those that it exchanges with; `name` is the same on all ranks, and new."""
        peers, topology, device = self._peers, self._topology, self._layout.device
        of_slice = peers.connect(topology.slice_ranks(), f"{name}/slice {topology.own_slice}", device)
        of_node = peers.connect(topology.node_ranks(), f"{name}/node {topology.node}", device)
        node = None
        if of_node is not None:
            buffers = self._channel.buffers
            arguments = (buffers, topology, of_node, self._node_dtype, self._kernels, self._meter)
            node = Node(*arguments) if self._side is None else DeviceNode(*arguments, self._side.report.status)
        return Link(of_slice, of_node, node, self._kernels, self._meter, threaded=peers.threaded)

    def close(self) -> None:
        """End the threads and connections of this optimizer. It takes no steps any more; its state can still be read.

        An optimizer that is no longer referenced does this by itself when it is collected.
        """
        self._closed = True
        self._disconnect()
        while self._at_close:
            self._at_close.pop()()

    def _disconnect(self) -> None:
        """End threads and connections until `_prepare` makes new ones.

        Ranks that still expect packets of this one fail at once instead of taking those of another stage for theirs.
        """
        if self._transport is not None:
            self._transport.close()
            self._transport = None
            for channel in self._channels.values():
                channel.disconnect()

    # A step ----------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Forget what was encoded; the next gradients belong to a new step."""
        self._step_number = int(self._step_count) + 1
        """The number of the step under way, from 1."""
        self._encoded = [False] * len(self._flat_params)
        self._presence = Presence(len(self._layout.buckets))
        self._flags_sent = self._first_flags()
        self._begin_exchange(self._channel_now())

    def _begin_exchange(self, name: str) -> None:
        self._channel = self._channels[name]
        if self._channel.released:
            self._channel.restore()
        self._under_way = False
        self._missing = [len(parts) for parts in self._channel.buffers.contents]
        self._submitted = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one optimization step, together with all other ranks.

        Args:
            closure: re-evaluates the model and returns the loss, as in torch.optim; called once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = self._amp_scale()
        self._refuse_rates_on_devices(self.param_groups)
        for group in self.param_groups:
            make_plain(group)
            self._check_group(group)
        self._refuse_capture(self._layout.device)
        refuse_thawed(self._frozen)
        _state_dict.refuse_changed(self)
        rest = [position for position, encoded in enumerate(self._encoded) if not encoded]
        gradients = [gradient_of(self._flat_params[position]) for position in rest]
        self._prepare()
        self._learn()
        with self._open_transport().abort_on_error():
            for position, grad in zip(rest, gradients, strict=True):
                self._encode(position, grad, scale)
            together = self._skips_together
            seen = self._wait()
            flags = self._settle(seen)
            self._open_transport().refuse()
            # A paper may take a step all the same, or hear of others' gradients only when it settles.
            self._overflowed = bool((seen | flags) & packet.NONFINITE)
            if flags & packet.NONFINITE:
                self._meter.skipped_steps += 1
            else:
                with self._meter.apply:
                    self._apply_all()
                    self._turn(len(self._flat_params))
                    self._conclude()
            self._end_step()
            self._meter.steps += 1
            self._step_count += 1
            self._begin_step()
        for tell in self._after_step:
            tell()
        if together and not self._is_unseen:
            self._skips.note(int(self._step_count), skipped=self._overflowed)
        self._replica_check.after(self, int(self._step_count))
        return loss

    def _encode_early(self, position: int, scale: Scale) -> None:
        """Encode one parameter's gradient before `step()` asks for it. Called by `attach` during backward."""
        self._refuse_capture(self._layout.device)
        if self._transport is None:
            # After load_state_dict() all ranks agree again, in step(): not here, because backward passes of different
            # ranks are at different places among the collectives of the user's own.
            return
        with self._open_transport().abort_on_error():
            self._encode(position, gradient_of(self._flat_params[position]), scale)

    def _encode(self, position: int, grad: Tensor | None, scale: Scale) -> None:
        """Apply the local rule to one parameter, and give the lanes all buckets that are complete by now."""
        p = self._flat_params[position]
        if form_of(p) != self._forms[position]:
            raise RuntimeError(
                f"a parameter is {form_of(p)}, but was {self._forms[position]} when the optimizer was made. Convert "
                "the model first, and make the optimizer then"
            )
        self._encoded[position] = True
        transport, channel = self._open_transport(), self._channel
        if not self._under_way:
            self._under_way = True
            self._before_exchange()
            transport.begin(channel, self._node, self._step_number)
        for part in channel.buffers.parts[position]:
            bucket = part.frame.bucket
            if grad is not None:
                self._presence.now[bucket.index] |= part.presence
            if self._node is None:
                self._flags_sent |= self._encode_part(position, part, grad, self._group_of(position), scale)
            elif not self._repeats:
                with self._meter.stage:
                    self._node.stage(position, bucket, grad, scale)
            self._missing[bucket.index] -= 1
            # In order, whatever the order of the gradients: lanes take the same bucket after the same on all ranks.
            while self._submitted < len(self._missing) and not self._missing[self._submitted]:
                self._submit(transport, self._submitted)
                self._submitted += 1

    @property
    def _node(self) -> AnyNode | None:
        return self._open_transport().link.node

    def _open_transport(self) -> Transport:
        assert self._transport is not None, "step() and attach() prepare before anything is encoded"
        return self._transport

    def _encode_part(self, position: int, part: Part, grad: Tensor | None, group: dict[str, Any], scale: Scale) -> int:
        with self._meter.encode:
            return packet.NONFINITE if self._local(position, part, grad, group, scale) else 0

    def _submit(self, transport: Transport, bucket: int) -> None:
        job = Job(self._channel.buffers.frames[bucket], self._step_number, self._flags_sent)
        encode_mean = None
        if self._node is not None:
            # A scheduler may change the groups while the lanes are still at it.
            groups = [dict(group) for group in self.param_groups]
            encode_mean = functools.partial(self._encode_mean, groups)
        transport.submit(job, self._presence, encode_mean, gradients=not self._repeats)

    def _encode_mean(self, groups: list[dict[str, Any]], position: int, part: Part, mean: Tensor | None) -> int:
        return self._encode_part(position, part, mean, groups[self._group_index[position]], 1.0)

    def _wait(self) -> int:
        assert self._submitted == len(self._missing), "all buckets are under way"
        transport = self._open_transport()
        if isinstance(transport, StreamTransport) and self._side is not None and self._needs_no_host:
            self._side.unseen = True
            transport.join()
            return 0
        with self._meter.exposed_wait:
            transport.drain()
        return transport.flags_seen

    def _finish_exchange(self) -> None:
        """End an exchange that backward has begun and no step() will end: all ranks send all of it, for nothing."""
        if any(self._encoded):
            for position, encoded in enumerate(self._encoded):
                if not encoded:
                    self._encode(position, None, 1.0)
        self._drain()

    def _exchange_again(self, name: str) -> int:
        """An exchange from the state as it is, with the presence that is known; the flags seen."""
        self._begin_exchange(name)
        self._repeats = True
        for position in range(len(self._flat_params)):
            self._encode(position, None, 1.0)
        self._repeats = False  # not in a `finally`: whatever is raised here is the end
        return self._wait()

    def _present(self) -> list[int]:
        """The positions of the parameters that have a gradient on some worker, as the answers say."""
        if isinstance(self._transport, StreamTransport):
            return self._present_on(self._transport)
        buffers = self._channel.buffers
        present = [buffers.read_presence(frame) for frame in buffers.frames]
        return [
            position
            for position, parts in enumerate(buffers.parts)
            if parts and present[parts[0].frame.bucket.index] & parts[0].presence
        ]

    def _apply_all(self) -> None:
        for position in self._present():
            p, parts = self._flat_params[position], self._channel.buffers.parts[position]
            dense = p if is_dense(p) else p.contiguous()
            master = self._kept_of[position].get("master")
            x, low = (dense, None) if master is None else (master, dense)
            self._turn(position)
            self._apply(position, parts, x, low, self._group_of(position))
            if dense is not p:
                p.copy_(dense)

    def metrics(self) -> Metrics:
        """What the run has cost so far, on this rank."""
        self._learn()
        return self._meter.read(mean_abs_vote=self._mean_abs_vote(), contraction=self._contraction())

    def _drain(self) -> None:
        self._learn()
        if self._transport is not None:
            self._transport.drain()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} has threads and process groups, which cannot be copied or pickled: "
            "save state_dict(), and load it into a new optimizer"
        )
