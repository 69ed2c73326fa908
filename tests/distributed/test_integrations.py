"""What `thinwire.integrations` does around a training loop, and what it refuses: clipping, scaling, logs, evaluation.

test_framework_checkpoints.py is about saving and resuming, test_frameworks.py about bits and bytes.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.distributed.common import digest, named, token_loss, token_net
from tests.distributed.framework_runs import SECONDS, as_torchrun_does, needs
from tests.distributed.stages import make
from tests.harness import run_ranks
from thinwire._unwrap import unwrapped_optimizer

LOCAL_STEP = 15
"""Of ZeroOneAdam, as `make` makes it: replicas differ after it."""


@contextlib.contextmanager
def refused(kind: type[Exception], message: str) -> Iterator[None]:
    with named(message), pytest.raises(kind, match=re.escape(message)):
        yield


def first_of_a_rank(rank: int, world_size: int) -> None:
    """The fork server has imported thinwire: not with a framework."""
    assert not {"accelerate", "lightning", "transformers"} & sys.modules.keys()
    as_torchrun_does(rank, world_size)


# Trainer --------------------------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """What Trainer trains: a model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = token_net()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(tokens), labels)}


class TrainerRun:
    """A trainer, and the digests of its model after each step and at each evaluation."""

    def __init__(self, path: Path, optimizer: Any = None, **arguments: Any) -> None:
        from transformers import Trainer, TrainerCallback, TrainingArguments

        run = self

        class Callback(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                run.replicas.append(digest(run.model.parameters()))

            def on_evaluate(self, *_: Any, **__: Any) -> None:
                run.evaluated.append(digest(run.model.parameters()))

        generator = torch.Generator().manual_seed(0)
        tokens, labels = (torch.randint(0, 25, (400,), generator=generator) for _ in range(2))
        examples: Any = [{"tokens": token, "labels": label} for token, label in zip(tokens, labels, strict=True)]
        self.model, self.replicas, self.evaluated = WithLoss(), [], []
        settings = {"max_steps": 3, "save_strategy": "no", "logging_strategy": "no", "report_to": [], **arguments}
        self.arguments = TrainingArguments(
            str(path),
            learning_rate=0.01,
            per_device_train_batch_size=8,
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            **settings,
        )
        optimizers = (optimizer(self.model.parameters()) if optimizer else None, None)
        self.trainer = Trainer(
            self.model, self.arguments, train_dataset=examples, eval_dataset=examples[:16], optimizers=optimizers
        )
        self.trainer.add_callback(Callback())

    def with_thinwire(self, *args: Any, **kwargs: Any) -> TrainerRun:
        from thinwire.integrations.transformers import ThinwireCallback

        self.trainer.add_callback(ThinwireCallback(self.trainer, *args, **kwargs))
        return self

    def train(self) -> list[str]:
        self.trainer.train()
        return list(self.replicas)

    @property
    def optimizer(self) -> Any:
        return unwrapped_optimizer(self.trainer.optimizer)


def in_trainer(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    first_of_a_rank(rank, world_size)
    plain = TrainerRun(path, lambda params: thinwire.Birder(params, lr=0.01, weight_decay=0.0, clip_norm=1.0))
    plain.trainer.args.max_grad_norm = 0.0
    thinwire.attach(plain.model, plain.trainer.optimizer)
    results: dict[str, Any] = {"plain": plain.train()}

    run = TrainerRun(path, logging_strategy="steps", logging_steps=1).with_thinwire(thinwire.Birder)
    results["class"] = run.train()
    results["clip_norm"] = run.optimizer._clipping.norm
    results["arguments of the user"] = run.arguments.max_grad_norm
    results["logs"] = [logs for logs in run.trainer.state.log_history if "loss" in logs]
    results["trained again"] = len(run.train()) == 6

    made = TrainerRun(path, lambda params: thinwire.Birder(params, lr=0.01, weight_decay=0.0)).with_thinwire()
    results["made before"] = made.train()

    scaled = TrainerRun(path).with_thinwire(thinwire.Birder)
    scaled.trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    results["scaled"] = scaled.train()

    own = TrainerRun(path, lambda params: thinwire.Birder(params, clip_norm=0.5)).with_thinwire()
    own.train()
    results["own limit"] = own.optimizer._clipping.norm

    evaluating = {"eval_strategy": "steps", "eval_steps": LOCAL_STEP, "max_steps": LOCAL_STEP}
    local = TrainerRun(path, lambda params: make("ZeroOneAdam", params), **evaluating)
    results["evaluated"] = (local.with_thinwire().train()[-1], local.evaluated)

    compressed = TrainerRun(path, logging_strategy="steps", logging_steps=1).with_thinwire(compressor="int4")
    results["compressed"] = compressed.train()
    results["logs of compress"] = [logs for logs in compressed.trainer.state.log_history if "loss" in logs]
    results["saved too late"] = saved_too_late(path)
    return results


def saved_too_late(path: Path) -> list[str]:
    """What is told if another callback asks for a checkpoint after ours was called."""
    from transformers import TrainerCallback

    class Saves(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = True

    run = TrainerRun(path, max_steps=1).with_thinwire(compressor="int4")
    run.trainer.add_callback(Saves())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train()
    return [str(each.message) for each in caught if "Add ThinwireCallback last" in str(each.message)]


@needs("transformers")
@needs("accelerate")
def test_trainer(tmp_path: Path) -> None:
    ranks = run_ranks(in_trainer, 2, tmp_path, timeout=SECONDS)
    for results in ranks:
        assert len(set(results["plain"])) == 3
        assert results["made before"] == results["plain"]
        # With the parameters in other groups: those with weight decay, and those without.
        assert results["class"] == results["scaled"] != results["plain"]
        assert results["clip_norm"] == results["arguments of the user"] == 1.0
        assert results["trained again"]
        assert results["own limit"] == 0.5
        assert results["compressed"] == ranks[0]["compressed"]
        for logs in (results["logs"], results["logs of compress"]):
            assert [each["thinwire/steps"] for each in logs] == [1, 2, 3]
            assert 0 < logs[0]["thinwire/bytes_sent"] < logs[1]["thinwire/bytes_sent"]
            assert all(0 <= each["thinwire/waited_share"] <= 1 for each in logs)
    before, evaluated = zip(*(results["evaluated"] for results in ranks), strict=True)
    assert before[0] != before[1], "step 15 is a local one"
    assert evaluated[0] == evaluated[1]
    assert [len(results["saved too late"]) for results in ranks] == [1, 0]


def compiled_in_trainer(rank: int, world_size: int, path: Path) -> list[list[str]]:
    as_torchrun_does(rank, world_size)
    runs = TrainerRun(path), TrainerRun(path, torch_compile=True, torch_compile_backend="aot_eager")
    return [run.with_thinwire(thinwire.Birder).train() for run in runs]


@pytest.mark.long
@pytest.mark.timeout(2 * SECONDS)
@needs("transformers")
@needs("accelerate")
def test_a_compiled_model_in_trainer(tmp_path: Path) -> None:
    for plain, compiled in run_ranks(compiled_in_trainer, 2, tmp_path, timeout=2 * SECONDS):
        assert compiled == plain


def misused_trainer(rank: int, world_size: int, path: Path) -> None:
    as_torchrun_does(rank, world_size)

    def birder(params: Any, **options: Any) -> thinwire.Birder:
        return thinwire.Birder(params, lr=0.01, **options)

    def stepped(params: Any) -> thinwire.Birder:
        optimizer = birder(list(params))
        optimizer.step()
        return optimizer

    with refused(TypeError, "trainer is type, expected a transformers.Trainer"):
        from thinwire.integrations.transformers import ThinwireCallback

        ThinwireCallback(thinwire.Birder)  # type: ignore[arg-type]
    with refused(TypeError, "optimizer is AdamW, expected the class of a thinwire optimizer"):
        TrainerRun(path).with_thinwire(torch.optim.AdamW)
    with refused(ValueError, "lr=0.1: expected TrainingArguments(learning_rate=0.1)"):
        TrainerRun(path).with_thinwire(thinwire.Birder, lr=0.1)
    with refused(ValueError, "downlink='votes' without the class of an optimizer"):
        TrainerRun(path, birder).with_thinwire(downlink="votes")
    with refused(ValueError, "the trainer was given an optimizer already"):
        TrainerRun(path, birder).with_thinwire(thinwire.Birder)
    with refused(ValueError, "optimizer=Birder and compressor='int4': expected one of them"):
        TrainerRun(path).with_thinwire(thinwire.Birder, compressor="int4")
    with refused(ValueError, "TrainingArguments(adam_beta2=0.95) is for the optimizers of Transformers"):
        TrainerRun(path, adam_beta2=0.95).with_thinwire(thinwire.Birder)
    with refused(TypeError, "the trainer's optimizer is AdamW, which is not thinwire's"):
        TrainerRun(path).with_thinwire().train()
    with refused(ValueError, "the trainer's optimizer is thinwire's Birder, which compresses already"):
        TrainerRun(path, birder).with_thinwire(compressor="int4").train()
    with refused(ValueError, "TrainingArguments(max_grad_norm=2.0), but the optimizer has clip_norm=0.5"):
        TrainerRun(path, lambda params: birder(params, clip_norm=0.5), max_grad_norm=2.0).with_thinwire().train()
    with refused(
        RuntimeError, "TrainingArguments(max_grad_norm=1.0): clip_norm=1.0, clip_value=None for a Birder that"
    ):
        TrainerRun(path, stepped).with_thinwire().train()
    with refused(ValueError, "ThinwireCallback was added to another trainer"):
        first, second = TrainerRun(path, birder), TrainerRun(path, birder)
        second.trainer.add_callback(ThinwireCallback(first.trainer))
        second.train()


@needs("transformers")
@needs("accelerate")
def test_misuse_of_trainer(tmp_path: Path) -> None:
    run_ranks(misused_trainer, 2, tmp_path, timeout=SECONDS)


def scalars_in(path: Path) -> dict[str, list[float]]:
    """The scalars of a TensorBoard event file, by tag."""
    event_type: Any = importlib.import_module("tensorboardX.proto.event_pb2").Event
    content, position, found = path.read_bytes(), 0, {}
    while position < len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        event = event_type.FromString(content[position + 12 : position + 12 + length])
        position += 12 + length + 4
        for value in event.summary.value:
            found.setdefault(value.tag, []).append(value.simple_value)
    return found


def with_tensorboard(rank: int, world_size: int, path: Path) -> None:
    as_torchrun_does(rank, world_size)
    run = TrainerRun(path, logging_strategy="steps", logging_steps=1, report_to=["tensorboard"])
    run.with_thinwire(thinwire.Birder).train()


@needs("transformers")
@needs("accelerate")
@needs("tensorboardX")
def test_tensorboard_shows_the_metrics_of_a_trainer(tmp_path: Path) -> None:
    run_ranks(with_tensorboard, 1, tmp_path, timeout=SECONDS)
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    scalars = scalars_in(events)
    assert scalars["train/thinwire/steps"] == [1, 2, 3]
    assert {"train/loss", "train/thinwire/bytes_sent_per_second", "train/thinwire/waited_share"} <= scalars.keys()


# Lightning ------------------------------------------------------------------------------------------------------------


class Fit:
    """A run of Lightning, and the digests of its module after each step and at each validation."""

    def __init__(self, rank: int, optimizer: Callable[..., Any], strategy: Any, **settings: Any) -> None:
        import lightning
        from lightning.pytorch.loggers.logger import DummyLogger

        run = self

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = token_net()

            def configure_optimizers(self) -> Any:
                return optimizer(self.parameters())

            def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
                return token_loss(self.net, rank, batch_idx)

            def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
                run.validated.append(digest(self.parameters()))

            def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
                run.replicas.append(digest(self.parameters()))

        class Logger(DummyLogger):
            def log_metrics(self, metrics: dict[str, float], step: int) -> None:
                run.logs.append({**metrics, "step": step})

        self.replicas, self.validated, self.logs = [], [], []
        self.module = Module()
        self.trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            logger=Logger(),  # type: ignore[arg-type]
            log_every_n_steps=1,
            **{
                "max_steps": 3,
                "limit_val_batches": 0,
                "num_sanity_val_steps": 0,
                "enable_checkpointing": False,
                **settings,
            },
            **dict.fromkeys(("enable_progress_bar", "enable_model_summary", "use_distributed_sampler"), False),
        )

    def train(self) -> list[str]:
        batches = torch.utils.data.DataLoader(list(range(20)), batch_size=None)  # type: ignore[arg-type]
        self.trainer.fit(self.module, batches, torch.utils.data.DataLoader([0], batch_size=None))  # type: ignore[arg-type]
        return self.replicas

    @property
    def optimizer(self) -> Any:
        return self.module.optimizers()._optimizer  # type: ignore[union-attr]


def birder(params: Any, **options: Any) -> thinwire.Birder:
    return thinwire.Birder(params, lr=0.01, **options)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def clipping_birder(params: Any) -> thinwire.Birder:
    return birder(params, clip_norm=0.5)


def plain_loop(rank: int, **options: Any) -> list[str]:
    """Three steps of DDP with Birder and attach."""
    net, replicas = token_net(), []
    optimizer = birder(net.parameters(), **options)
    model = nn.parallel.DistributedDataParallel(net)
    thinwire.attach(model, optimizer)
    for batch in range(3):
        token_loss(model, rank, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        replicas.append(digest(net.parameters()))
    return replicas


def in_lightning(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    first_of_a_rank(rank, world_size)
    from lightning.pytorch.plugins.precision import MixedPrecision

    from thinwire.integrations.lightning import ThinwireStrategy

    class Unscaled(MixedPrecision):
        """A scaler in full precision, so that bits can be compared."""

        def autocast_context_manager(self) -> Any:
            return contextlib.nullcontext()

    results: dict[str, Any] = {"plain": plain_loop(rank), "plain, clipped": plain_loop(rank, clip_norm=0.5)}
    run = Fit(rank, birder, ThinwireStrategy())
    results["strategy"], results["logs"] = run.train(), run.logs
    clipped = Fit(rank, birder, ThinwireStrategy(find_unused_parameters=True), gradient_clip_val=0.5)
    results["clipped"], results["given back"] = clipped.train(), clipped.trainer.gradient_clip_val
    by_value = Fit(rank, birder, ThinwireStrategy(), gradient_clip_val=0.01, gradient_clip_algorithm="value")
    by_value.train()
    results["by value"] = by_value.optimizer._clipping.settings()
    results["clipped by both"] = Fit(rank, clipping_birder, ThinwireStrategy(), gradient_clip_val=0.5).train()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    results["scaled"] = Fit(rank, birder, ThinwireStrategy(), plugins=[Unscaled("16-mixed", "cpu", scaler)]).train()

    validating = {"max_steps": LOCAL_STEP, "limit_val_batches": 1, "val_check_interval": LOCAL_STEP}
    local = Fit(rank, lambda params: make("ZeroOneAdam", params), ThinwireStrategy(), **validating)
    results["validated"] = (local.train()[-1], local.validated)
    saving = Fit(rank, lambda params: make("ZeroOneAdam", params), ThinwireStrategy(), max_steps=LOCAL_STEP)
    saving.module.on_train_batch_end = lambda *_: (  # type: ignore[method-assign]
        saving.trainer.save_checkpoint(path / "weights", weights_only=True)
        if saving.trainer.global_step == LOCAL_STEP
        else None
    )
    saving.train()
    saved = torch.load(path / "weights", weights_only=True)["state_dict"]
    results["weights"] = (digest(saved.values()), digest(saving.module.parameters()))

    compressed = Fit(rank, adamw, ThinwireStrategy("int4", compressor_options={"block": 32}), gradient_clip_val=0.5)
    results["compressed"], results["logs of compress"] = compressed.train(), compressed.logs

    with refused(ValueError, "ddp_comm_hook='hook' exchanges gradients in another way"):
        ThinwireStrategy(ddp_comm_hook="hook")
    with refused(ValueError, "compressor_options={'block': 32} without a compressor"):
        ThinwireStrategy(compressor_options={"block": 32})
    with refused(TypeError, "configure_optimizers returned AdamW, which is not thinwire's"):
        Fit(rank, adamw, ThinwireStrategy()).train()
    with refused(TypeError, "configure_optimizers returned thinwire's Birder, which compresses already"):
        Fit(rank, birder, ThinwireStrategy("int4")).train()
    with refused(TypeError, "configure_optimizers returned Birder, Birder, expected one optimizer"):
        two = Fit(rank, lambda params: [birder([p]) for p in list(params)[:2]], ThinwireStrategy())
        two.module.automatic_optimization = False
        two.train()
    with refused(ValueError, "Trainer(gradient_clip_val=0.1), but the optimizer has clip_norm=0.5"):
        Fit(rank, clipping_birder, ThinwireStrategy(), gradient_clip_val=0.1).train()
    with refused(RuntimeError, "thinwire.attach"):  # DDP averages, and so would Birder
        Fit(rank, birder, "ddp").train()
    return results


@needs("lightning")
def test_lightning(tmp_path: Path) -> None:
    ranks = run_ranks(in_lightning, 2, tmp_path, timeout=SECONDS)
    for results in ranks:
        assert len(set(results["plain"])) == 3
        assert results["plain, clipped"][-1] not in results["plain"]
        assert results["strategy"] == results["scaled"] == results["plain"]
        assert results["clipped"] == results["clipped by both"] == results["plain, clipped"]
        assert results["given back"] == 0.5
        assert results["by value"] == {"clip_value": 0.01}
        assert results["compressed"] == ranks[0]["compressed"]
        for logs in (results["logs"], results["logs of compress"]):
            assert [(each["step"], each["thinwire/steps"]) for each in logs] == [(0, 1), (1, 2), (2, 3)]
    before, validated = zip(*(results["validated"] for results in ranks), strict=True)
    assert before[0] != before[1], "step 15 is a local one"
    assert validated[0] == validated[1]
    assert len(validated[0]) == 1
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["weights"][0] == ranks[0]["weights"][1]


# Accelerate -----------------------------------------------------------------------------------------------------------


def in_accelerate(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    first_of_a_rank(rank, world_size)
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    from thinwire.integrations.accelerate import attach, compress

    def train(*, attach_first: bool = True, scaled: bool = False, clip: bool = False) -> list[str]:
        net, accelerator, replicas = token_net(), Accelerator(cpu=True), []
        if scaled:
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = birder(net.parameters())
        if attach_first:
            attach(accelerator, net, optimizer)
        model, prepared = accelerator.prepare(net, optimizer)
        if not attach_first:
            attach(accelerator, model, prepared)
        for batch in range(3):
            accelerator.backward(token_loss(model, rank, batch))
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            prepared.step()
            prepared.zero_grad()
            replicas.append(digest(net.parameters()))
        return replicas

    results: dict[str, Any] = {"plain": plain_loop(rank), "before": train(), "after": train(attach_first=False)}
    results["scaled"] = train(scaled=True)
    with refused(thinwire.GradientChanged, "clip_norm"):
        train(clip=True)
    net = token_net()
    with refused(TypeError, "accelerator is TokenNet, expected accelerate.Accelerator"):
        attach(net, birder(net.parameters()), None)  # type: ignore[arg-type]
    with refused(TypeError, "compress: model is TokenNet, expected torch.nn.parallel.DistributedDataParallel"):
        compress(Accelerator(cpu=True), net)
    forgetful = Accelerator(cpu=True)
    attach(forgetful, net, birder(net.parameters()))
    with refused(RuntimeError, "the TokenNet that was given to thinwire.integrations.accelerate was never prepared"):
        forgetful.save_state(str(path / "unprepared"))
    sharding = Accelerator(cpu=True)
    sharding.state.distributed_type = DistributedType.FSDP  # Accelerate uses it on GPUs only
    with refused(TypeError, "the accelerator uses FSDP, expected DistributedDataParallel"):
        attach(sharding, net, birder(net.parameters()))
    return results


@needs("accelerate")
def test_accelerate(tmp_path: Path) -> None:
    for results in run_ranks(in_accelerate, 2, tmp_path, timeout=SECONDS):
        assert results["before"] == results["after"] == results["scaled"] == results["plain"]
