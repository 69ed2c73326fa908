"""`ThinwireStrategy`: thinwire in the Trainer of Lightning.

Example::

    trainer = Trainer(strategy=ThinwireStrategy(), devices=4)      # and configure_optimizers returns thinwire.Birder

docs/frameworks.md has the whole script. Fabric needs no integration: call `thinwire.attach` after `fabric.setup`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire._unwrap import unwrapped_optimizer
from thinwire.attach import attach
from thinwire.averaging.handle import Compression
from thinwire.compress import compress
from thinwire.integrations._limits import clip_in_optimizer
from thinwire.integrations._metrics import MetricsLog
from thinwire.integrations._rank_state import restore, state_of_rank
from thinwire.integrations._residuals import Residuals
from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.transport.peers import Peers

_HOOKS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
"""Arguments of DDPStrategy that exchange gradients in another way."""
_RANKS = "thinwire_ranks"
"""The entry of a saved optimizer state with what Lightning does not save, of all ranks."""


class ThinwireStrategy(DDPStrategy):
    """Lightning's DDPStrategy, in which thinwire exchanges the gradients.

    If `configure_optimizers` returns a thinwire optimizer, it is attached to the model. With any other optimizer, give
    a compressor: `ThinwireStrategy("int4")` averages gradients in compressed form.

    What it does, besides `thinwire.attach` or `thinwire.compress` with Lightning's GradScaler:

    * checkpoints have the states of all ranks, their random number generators (of torch and Python), and in the middle
      of an accumulation their gradients. `trainer.fit(..., ckpt_path=...)` continues as if the run had never stopped,
      to the bit, if the data loader does;
    * replicas are equal when Lightning validates or saves, also with `thinwire.ZeroOneAdam`;
    * `Trainer(gradient_clip_val=...)` becomes `clip_norm` or `clip_value` of a thinwire optimizer (docs/guide.md,
      gradient clipping), and Lightning's own clipping, which would come too late, is off. With a compressor, Lightning
      clips the averaged gradient, as usual;
    * loggers get the metrics of rank 0: `thinwire/bytes_sent`, `thinwire/waited_share`, and so on.

    Args:
        compressor: the name of a compressor of `thinwire.compress`; None with a thinwire optimizer.
        compressor_options: options of `thinwire.compress`.
        **ddp: arguments of DDPStrategy, such as `find_unused_parameters`. Not its communication hooks: they get no
            model, and Lightning does not call them on CPUs.

    Raises:
        ValueError: if a communication hook is given, or options without a compressor.
        TypeError: when training starts, if the optimizer does not fit.
    """

    def __init__(
        self, compressor: str | None = None, *, compressor_options: Mapping[str, Any] | None = None, **ddp: Any
    ) -> None:
        hooks = [name for name in _HOOKS if ddp.get(name) is not None]
        if hooks:
            raise ValueError(
                f"ThinwireStrategy: {hooks[0]}={ddp[hooks[0]]!r} exchanges gradients in another way. Leave it out, or "
                "use DDPStrategy"
            )
        if compressor_options and compressor is None:
            raise ValueError(f"ThinwireStrategy: compressor_options={compressor_options!r} without a compressor")
        super().__init__(**ddp)
        self._compressor = compressor
        self._compressor_options = dict(compressor_options or {})
        self._residuals = Residuals()
        self._compression: Compression | None = None
        self._metrics: MetricsLog | None = None
        self._has_accumulated = False
        """Whether there are gradients that no step has applied."""
        self._loaded: dict[str, Any] | None = None
        """The entry of this rank in a checkpoint that was loaded, until the first batch."""
        self._unclip: Callable[[], None] | None = None
        """Gives the trainer its own clipping back."""

    # When training starts ---------------------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizer, and attach it or compress the averaging. Lightning loads its state afterwards."""
        super().setup_optimizers(trainer)
        model, scaler = self.model, getattr(self.precision_plugin, "scaler", None)
        assert isinstance(model, DistributedDataParallel)
        optimizer = self._the_optimizer()
        if self._compressor is not None:
            self._residuals = Residuals()
            self._residuals.follow(optimizer)
            options = self._compressor_options
            source = self._compression = compress(model, self._compressor, grad_scaler=scaler, **options)
            self._residuals.belong_to(source)
        else:
            assert isinstance(optimizer, WireOptimizer)
            self._take_clipping_over(trainer, optimizer)
            attach(model, optimizer, grad_scaler=scaler)
            source = optimizer
        self._peers = Peers.of(model.process_group)
        self._metrics = MetricsLog(source)
        self._has_accumulated = False

    def _the_optimizer(self) -> Optimizer:
        optimizers = [unwrapped_optimizer(optimizer) for optimizer in self.optimizers]
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        if len(optimizers) != 1:
            raise TypeError(f"ThinwireStrategy: configure_optimizers returned {names}, expected one optimizer")
        if self._compressor is None and not isinstance(optimizers[0], WireOptimizer):
            raise TypeError(
                f"ThinwireStrategy: configure_optimizers returned {names}, which is not thinwire's. Return a "
                "thinwire.Birder, or keep the optimizer and use ThinwireStrategy('int4')"
            )
        if self._compressor is not None and isinstance(optimizers[0], WireOptimizer):
            raise TypeError(
                f"ThinwireStrategy({self._compressor!r}): configure_optimizers returned thinwire's {names}, which "
                "compresses already. Use ThinwireStrategy(), or an optimizer of torch"
            )
        return optimizers[0]

    def _take_clipping_over(self, trainer: Trainer, optimizer: WireOptimizer) -> None:
        limit, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        if not limit:
            return
        kind = "value" if algorithm == GradClipAlgorithmType.VALUE else "norm"
        clip_in_optimizer(optimizer, f"Trainer(gradient_clip_val={limit!r})", **{kind: float(limit)})

        def unclip() -> None:
            trainer.gradient_clip_val = limit

        trainer.gradient_clip_val, self._unclip = None, unclip

    def teardown(self) -> None:
        """Return the trainer's own clipping to it."""
        if self._unclip is not None:
            self._unclip()
            self._unclip = None
        super().teardown()

    # While it runs ----------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Continue with the random numbers and gradients of a checkpoint, in the first batch after it.

        Not earlier: Lightning sets gradients to zero, and data loaders draw random numbers, before the first batch.
        """
        super().on_train_batch_start(batch, batch_idx)
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            restore(self._module, loaded)
            self._has_accumulated = loaded["gradients"] is not None

    def post_backward(self, closure_loss: Tensor) -> None:
        """Note that there are gradients."""
        super().post_backward(closure_loss)
        self._has_accumulated = True

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Take a step, and log metrics as often as the trainer logs."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._has_accumulated = False
        trainer: Any = self._module.trainer
        every = trainer.log_every_n_steps  # 0 for never
        # The trainer counts this step after it.
        if self._metrics is not None and trainer.loggers and every and (trainer.global_step + 1) % every == 0:
            metrics = self._metrics.read()
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)
        return output

    def on_validation_start(self) -> None:
        """Make replicas equal."""
        super().on_validation_start()
        self._synchronize()

    def on_train_end(self) -> None:
        """Make replicas equal."""
        super().on_train_end()
        self._synchronize()

    def _synchronize(self) -> None:
        for optimizer in map(unwrapped_optimizer, self.optimizers):
            if isinstance(optimizer, WireOptimizer):
                optimizer.synchronize()

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Make replicas equal first: what is saved may be the weights alone."""
        self._synchronize()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The states of all ranks, on rank 0."""
        self._residuals.gather()
        state: dict[str, Any] = super().optimizer_state(optimizer)
        own = state_of_rank(self._module, accumulating=self._has_accumulated)
        of_all = self._peers.gather_on(0, own, "random states and gradients")
        return state if of_all is None else {**state, _RANKS: of_all}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of this rank."""
        super().load_optimizer_state_dict(checkpoint)
        for state in checkpoint["optimizer_states"]:
            # The optimizer has checked that the state is of as many ranks, if it depends on them.
            of_all = state.get(_RANKS, [])
            if len(of_all) == self._peers.size:
                self._loaded = of_all[self._peers.rank]

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None, "the trainer has connected it"
        return self.lightning_module
