"""Checkpoints of Accelerate, Lightning and Trainer, which save the optimizer of rank 0: resumed on all ranks, to the
bit."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import FRAMEWORKS, by_case, digest, each_case, token_loss, token_net
from tests.distributed.stages import make
from tests.harness import run_ranks
from thinwire import checkpoint
from thinwire.optimizers.optimizer import WireOptimizer

SAVED_AT, STEPS = 15, 19
"""ZeroOneAdam's step 15 is a local one."""
OPTIMIZERS: Mapping[str, Callable[..., Any]] = {
    "Birder": functools.partial(thinwire.Birder, lr=0.01),
    "CDAdam": functools.partial(thinwire.CDAdam, lr=0.01),
    "OneBitAdam": functools.partial(make, "OneBitAdam"),
    "ZeroOneAdam": functools.partial(make, "ZeroOneAdam"),
}
SECONDS = 150.0


def needs(framework: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(framework) is None
    return pytest.mark.skipif(missing, reason=f"{framework} is not installed: pip install '.[integrations]'")


def as_torchrun_does(rank: int, world_size: int) -> None:
    """Set what frameworks read to learn that they were launched by torchrun. The process group exists already."""
    settings = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size}
    settings |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": 1}
    os.environ.update({name: str(value) for name, value in settings.items()})
    warnings.filterwarnings("ignore", module=r"accelerate|lightning|torch|transformers")


# Accelerate -----------------------------------------------------------------------------------------------------------


class AcceleratedRun:
    def __init__(self, name: str, rank: int) -> None:
        from accelerate import Accelerator

        self.rank, self.net, self.accelerator = rank, token_net(), Accelerator(cpu=True)
        self.optimizer = OPTIMIZERS[name](self.net.parameters())
        self.model, self.wrapped = self.accelerator.prepare(self.net, self.optimizer)
        assert self.wrapped is not self.optimizer
        thinwire.attach(self.model, self.optimizer)

    def train(self, steps: range) -> list[str]:
        replicas = []
        for step in steps:
            self.accelerator.backward(token_loss(self.model, self.rank, step))
            self.wrapped.step()
            self.wrapped.zero_grad()
            replicas.append(digest(self.net.parameters()))
        return replicas


def through_accelerate(rank: int, world_size: int, name: str, path: Path) -> dict[str, Any]:
    first = AcceleratedRun(name, rank)
    first.accelerator.register_save_state_pre_hook(lambda *_: first.optimizer.consolidate_state_dict())
    first.train(range(SAVED_AT))
    first.accelerator.save_state(str(path / name / "state"))
    checkpoint.save(path / name / "own", first.model, first.wrapped, SAVED_AT)
    never_stopped = first.train(range(SAVED_AT, STEPS))
    second, third = AcceleratedRun(name, rank), AcceleratedRun(name, rank)
    second.accelerator.load_state(str(path / name / "state"))
    checkpoint.load(path / name / "own", third.model, third.wrapped)
    saved = torch.load(path / name / "state" / "optimizer.bin", weights_only=True)
    assert checkpoint.load_state_dict(third.wrapped, saved)
    runs = {"state": second.train(range(SAVED_AT, STEPS)), "own": third.train(range(SAVED_AT, STEPS))}
    return {"never stopped": never_stopped, **runs}


def warned_by_accelerate(rank: int, path: Path) -> list[str]:
    """What is told, at which line, if nobody consolidates."""
    run = AcceleratedRun("Birder", rank)
    run.train(range(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run.accelerator.save_state(str(path / "alone"))
    return about_rank_zero(caught)


def about_rank_zero(caught: list[warnings.WarningMessage]) -> list[str]:
    """The warnings that only the state of rank 0 is saved, which must be about a line of this file."""
    mine = [warning for warning in caught if "rank 0 only" in str(warning.message)]
    assert all(warning.filename == __file__ for warning in mine)
    return [str(warning.message) for warning in mine]


def in_accelerate(rank: int, world_size: int, path: Path) -> tuple[dict[str, Any], list[str]]:
    as_torchrun_does(rank, world_size)
    return each_case(rank, world_size, through_accelerate, {name: name for name in OPTIMIZERS}, path), (
        warned_by_accelerate(rank, path)
    )


@needs("accelerate")
def test_accelerate(tmp_path: Path) -> None:
    results = run_ranks(in_accelerate, 2, tmp_path, timeout=SECONDS, preload=FRAMEWORKS)
    for name, ranks in by_case([of_rank for of_rank, _ in results]).items():
        for runs in ranks:
            assert len(set(runs["never stopped"])) == STEPS - SAVED_AT
            for way in ("state", "own"):
                assert runs[way] == runs["never stopped"], (name, way)
    told = [warnings_of_rank for _, warnings_of_rank in results]
    assert [len(of_rank) for of_rank in told] == [1, 0]
    assert told[0][0].startswith("accelerate saves the optimizer state of rank 0 only, and each rank has its own")


# Lightning ------------------------------------------------------------------------------------------------------------


def lightning_module(name: str, rank: int) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = token_net()
            self.replicas: list[str] = []
            self.steps: list[int] = []

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.net(tokens)

        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[name](self.parameters())

        def on_train_start(self) -> None:
            model, (optimizer,) = self.trainer.strategy.model, self.trainer.optimizers
            assert isinstance(model, DistributedDataParallel)
            assert isinstance(optimizer, WireOptimizer)
            thinwire.attach(model, optimizer)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            # Not the batch: Lightning begins with the first one again.
            return token_loss(self, rank, self.trainer.global_step)

        def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
            self.replicas.append(digest(self.net.parameters()))
            self.steps.append(self.trainer.global_step)

    return Module()


def fit(name: str, rank: int, path: Path, ckpt_path: Path | None) -> Any:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    module = lightning_module(name, rank)
    save = ModelCheckpoint(path, filename="{step}", every_n_train_steps=SAVED_AT, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        callbacks=[] if ckpt_path else [save],
        enable_checkpointing=not ckpt_path,
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"), False),
    )
    batches = torch.utils.data.DataLoader(list(range(STEPS)), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, batches, ckpt_path=ckpt_path and str(ckpt_path), weights_only=True)
    return module


def through_lightning(rank: int, world_size: int, name: str, path: Path) -> dict[str, Any]:
    first = fit(name, rank, path / name, None)
    (saved,) = (path / name).glob("*.ckpt")
    second = fit(name, rank, path / name, saved)
    assert second.steps == list(range(SAVED_AT + 1, STEPS + 1))
    return {"never stopped": first.replicas[SAVED_AT:], "resumed": second.replicas}


def in_lightning(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    as_torchrun_does(rank, world_size)
    return each_case(rank, world_size, through_lightning, {name: name for name in OPTIMIZERS}, path)


@needs("lightning")
def test_lightning(tmp_path: Path) -> None:
    results = run_ranks(in_lightning, 2, tmp_path, timeout=SECONDS, preload=FRAMEWORKS)
    for name, ranks in by_case(results).items():
        for runs in ranks:
            assert len(set(runs["never stopped"])) == STEPS - SAVED_AT
            assert runs["resumed"] == runs["never stopped"], name


# Trainer --------------------------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """What Trainer trains: a model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = token_net()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(tokens), labels)}


def trained_by_trainer(name: str, path: Path, *, consolidate: bool, resume: bool) -> tuple[list[str], list[str]]:
    """The digests after each step, and what is told about the state of rank 0."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, replicas = WithLoss(), []
    optimizer = OPTIMIZERS[name](model.parameters())

    class Callback(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            assert isinstance(trainer.model_wrapped, DistributedDataParallel)
            thinwire.attach(trainer.model_wrapped, optimizer)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if consolidate and control.should_save:
                optimizer.consolidate_state_dict()
            replicas.append(digest(model.parameters()))

    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, 25, (400,), generator=generator) for _ in range(2))
    arguments = TrainingArguments(
        str(path),
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=SAVED_AT,
        per_device_train_batch_size=8,
        max_grad_norm=0.0,
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    examples: Any = [{"tokens": token, "labels": label} for token, label in zip(tokens, labels, strict=True)]
    trainer = Trainer(model, arguments, train_dataset=examples, optimizers=(optimizer, None), callbacks=[Callback()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=str(path / f"checkpoint-{SAVED_AT}") if resume else None)
    return replicas, about_rank_zero(caught)


def through_trainer(rank: int, world_size: int, name: str, path: Path) -> dict[str, Any]:
    never_stopped, told = trained_by_trainer(name, path / name, consolidate=True, resume=False)
    resumed, _ = trained_by_trainer(name, path / name, consolidate=True, resume=True)
    return {"never stopped": never_stopped[SAVED_AT:], "resumed": resumed, "told": told}


def in_trainer(rank: int, world_size: int, path: Path) -> tuple[dict[str, Any], list[str]]:
    as_torchrun_does(rank, world_size)
    cases = each_case(rank, world_size, through_trainer, {name: name for name in OPTIMIZERS}, path)
    return cases, trained_by_trainer("Birder", path / "alone", consolidate=False, resume=False)[1]


@needs("transformers")
@needs("accelerate")
def test_trainer(tmp_path: Path) -> None:
    results = run_ranks(in_trainer, 2, tmp_path, timeout=SECONDS, preload=FRAMEWORKS)
    for name, ranks in by_case([of_rank for of_rank, _ in results]).items():
        for runs in ranks:
            assert len(set(runs["never stopped"])) == STEPS - SAVED_AT
            assert runs["resumed"] == runs["never stopped"], name
            assert runs["told"] == []
    assert [[told.partition(" saves")[0] for told in of_rank] for _, of_rank in results] == [["transformers"], []]
