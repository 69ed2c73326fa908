"""Checkpoints of Accelerate, Lightning, Fabric and Trainer through `thinwire.integrations`: resumed to the bit.

Every optimizer and two compressors, with gradient accumulation and dropout. Accelerate and Lightning save in the middle
of an accumulation, when ZeroOneAdam has taken a local step.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.distributed.common import FRAMEWORKS, by_case, digest, each_case, token_loss
from tests.distributed.framework_runs import (
    COMPRESSORS,
    MICROBATCHES,
    OPTIMIZERS,
    SECONDS,
    DroppingNet,
    as_torchrun_does,
    dropping_net,
    needs,
)
from tests.harness import run_ranks
from thinwire import checkpoint

SAVED_AT, STEPS = 15, 19
"""ZeroOneAdam's step 15 is a local one."""
SAVED_IN = MICROBATCHES * SAVED_AT
"""The first backward after step 15, in whose middle Accelerate and Lightning save."""
FEW = ("Birder", "CDAdam", "OneBitAdam", "ZeroOneAdam", "int4")
OTHERS = tuple(name for name in (*OPTIMIZERS, *COMPRESSORS) if name not in FEW)
Names = tuple[str, ...]
grid = pytest.mark.parametrize("names", [FEW, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["few", "others"])


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def assert_resumed(results: list[dict[str, Any]]) -> None:
    """Every rank moved, in every step, as the others did and as the run that was never stopped.

    Except ZeroOneAdam in its local steps.
    """
    for name, ranks in by_case(results).items():
        for runs in ranks:
            assert len(set(runs["never stopped"])) == STEPS - SAVED_AT, name
            assert name == "ZeroOneAdam" or runs == ranks[0], name
            assert runs["resumed"] == runs["never stopped"], name


def about_rank_zero(caught: list[warnings.WarningMessage]) -> list[str]:
    """The warnings that only the state of rank 0 is saved, which must be about a line of this file."""
    mine = [warning for warning in caught if "rank 0 only" in str(warning.message)]
    assert all(warning.filename == __file__ for warning in mine)
    return [str(warning.message) for warning in mine]


# Accelerate -----------------------------------------------------------------------------------------------------------


class AcceleratedRun:
    def __init__(self, name: str, rank: int, *, integrated: bool = True) -> None:
        from accelerate import Accelerator

        from thinwire.integrations import accelerate as integration

        self.rank, self.net = rank, dropping_net(rank)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICROBATCHES)
        optimizer = adamw(self.net) if name in COMPRESSORS else OPTIMIZERS[name](self.net.parameters())
        if name not in COMPRESSORS and integrated:
            integration.attach(self.accelerator, self.net, optimizer)
        self.model, self.optimizer = self.accelerator.prepare(self.net, optimizer)
        assert self.optimizer is not optimizer
        if name in COMPRESSORS:
            integration.compress(self.accelerator, self.model, name)
        elif not integrated:
            thinwire.attach(self.model, self.optimizer)

    def train(self, batches: range, save: Path | None = None) -> list[str]:
        """What each step leaves. With `save`, saves in the middle of a step."""
        replicas = []
        # A data loader draws a random number when it starts.
        for batch in torch.utils.data.DataLoader(batches, batch_size=None):  # type: ignore[arg-type]
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(token_loss(self.model, self.rank, batch))
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                replicas.append(digest(self.net.parameters()))
            elif save is not None and batch == SAVED_IN:
                self.accelerator.save_state(str(save))
        return replicas


def through_accelerate(rank: int, world_size: int, name: str, path: Path) -> dict[str, Any]:
    first, second = AcceleratedRun(name, rank), AcceleratedRun(name, rank)
    never_stopped = first.train(range(MICROBATCHES * STEPS), save=path / name)
    second.accelerator.load_state(str(path / name))
    resumed = second.train(range(SAVED_IN + 1, MICROBATCHES * STEPS))
    return {"never stopped": never_stopped[SAVED_AT:], "resumed": resumed}


def own_checkpoint_of_wrapped_objects(rank: int, path: Path) -> bool:
    """`thinwire.checkpoint` takes what Accelerate hands out."""
    runs = AcceleratedRun("Birder", rank), AcceleratedRun("Birder", rank)
    runs[0].train(range(MICROBATCHES))
    checkpoint.save(path / "own", runs[0].model, runs[0].optimizer, 1)
    found = checkpoint.load(path / "own", runs[1].model, runs[1].optimizer)
    return found is not None and digest(runs[0].net.parameters()) == digest(runs[1].net.parameters())


def warned_by_accelerate(rank: int, path: Path) -> list[str]:
    """What is told, at which line, if nobody consolidates."""
    run = AcceleratedRun("Birder", rank, integrated=False)
    run.train(range(MICROBATCHES))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run.accelerator.save_state(str(path / "alone"))
    return about_rank_zero(caught)


def in_accelerate(rank: int, world_size: int, names: Names, path: Path) -> tuple[dict[str, Any], list[str], bool]:
    as_torchrun_does(rank, world_size)
    cases = each_case(rank, world_size, through_accelerate, {name: name for name in names}, path)
    return cases, warned_by_accelerate(rank, path), own_checkpoint_of_wrapped_objects(rank, path)


@grid
@needs("accelerate")
def test_accelerate(names: Names, tmp_path: Path) -> None:
    results = run_ranks(in_accelerate, 2, names, tmp_path, timeout=SECONDS, preload=FRAMEWORKS)
    assert_resumed([cases for cases, _, _ in results])
    assert all(loaded for _, _, loaded in results)
    told = [warnings_of_rank for _, warnings_of_rank, _ in results]
    assert [len(of_rank) for of_rank in told] == [1, 0]
    assert told[0][0].startswith("accelerate saves the optimizer state of rank 0 only, and each rank has its own")


# Lightning ------------------------------------------------------------------------------------------------------------


def fit(name: str, rank: int, path: Path, ckpt_path: Path | None) -> list[str]:
    """What each step leaves. Saves after the first backward of a step."""
    import lightning

    from thinwire.integrations.lightning import ThinwireStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = dropping_net(rank)
            self.replicas: list[str] = []

        def configure_optimizers(self) -> Any:
            return adamw(self) if name in COMPRESSORS else OPTIMIZERS[name](self.parameters())

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            # Not the batch: Lightning begins with the first one again.
            return token_loss(self.net, rank, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
            if (batch_idx + 1) % MICROBATCHES == 0:
                self.replicas.append(digest(self.net.parameters()))
            elif batch_idx == SAVED_IN and ckpt_path is None:
                self.trainer.save_checkpoint(path)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ThinwireStrategy(name if name in COMPRESSORS else None),
        accumulate_grad_batches=MICROBATCHES,
        max_steps=STEPS,
        enable_checkpointing=False,
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"), False),
    )
    batches = torch.utils.data.DataLoader(list(range(MICROBATCHES * STEPS)), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, batches, ckpt_path=ckpt_path and str(ckpt_path), weights_only=True)
    return module.replicas


def through_lightning(rank: int, world_size: int, name: str, path: Path) -> dict[str, Any]:
    never_stopped = fit(name, rank, path / f"{name}.ckpt", None)
    return {"never stopped": never_stopped[SAVED_AT:], "resumed": fit(name, rank, path, path / f"{name}.ckpt")}


class FabricRun:
    """Fabric needs no integration: it saves what has a state, and consolidates optimizers."""

    def __init__(self, name: str, rank: int) -> None:
        from lightning.fabric import Fabric

        self.rank, self.net = rank, dropping_net(rank)
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        self.fabric.launch()
        optimizer = adamw(self.net) if name in COMPRESSORS else OPTIMIZERS[name](self.net.parameters())
        self.model, self.optimizer = self.fabric.setup(self.net, optimizer)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if name in COMPRESSORS:
            self.state["compression"] = thinwire.compress(self.model, name)
        else:
            thinwire.attach(self.model, self.optimizer)

    def train(self, steps: range) -> list[str]:
        replicas = []
        for step in steps:
            torch.manual_seed(1000 * self.rank + step)  # dropout: Fabric leaves random numbers to its user
            for batch in range(MICROBATCHES):
                with self.fabric.no_backward_sync(self.model, enabled=batch < MICROBATCHES - 1):
                    self.fabric.backward(token_loss(self.model, self.rank, MICROBATCHES * step + batch))
            self.optimizer.step()
            self.optimizer.zero_grad()
            replicas.append(digest(self.net.parameters()))
        return replicas

    def save(self, path: Path) -> None:
        if "compression" in self.state:
            self.state["compression"].consolidate_state_dict()
        self.fabric.save(path, self.state)


def through_fabric(rank: int, world_size: int, name: str, path: Path) -> dict[str, Any]:
    first, second = FabricRun(name, rank), FabricRun(name, rank)
    first.train(range(SAVED_AT))
    first.save(path / f"{name}.fabric")
    second.fabric.load(path / f"{name}.fabric", second.state)
    return {
        "never stopped": first.train(range(SAVED_AT, STEPS)),
        "resumed": second.train(range(SAVED_AT, STEPS)),
    }


def in_lightning(rank: int, world_size: int, names: Names, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    as_torchrun_does(rank, world_size)
    return (
        each_case(rank, world_size, through_lightning, {name: name for name in names}, path),
        each_case(rank, world_size, through_fabric, {name: name for name in names}, path),
    )


@grid
@needs("lightning")
def test_lightning(names: Names, tmp_path: Path) -> None:
    results = run_ranks(in_lightning, 2, names, tmp_path, timeout=SECONDS, preload=FRAMEWORKS)
    for of_one in zip(*results, strict=True):
        assert_resumed(list(of_one))


# Trainer --------------------------------------------------------------------------------------------------------------


class WithLoss(DroppingNet):
    """What Trainer trains: a model that returns its loss."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": nn.functional.cross_entropy(super().forward(tokens), labels)}


def trained_by_trainer(
    name: str, path: Path, *, integrated: bool = True, resume: bool = False
) -> tuple[list[str], list[str]]:
    """The digests after each step, and what is told about the state of rank 0."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from thinwire.integrations.transformers import ThinwireCallback

    torch.manual_seed(0)
    model, replicas = WithLoss(), []
    optimizer = None if name in COMPRESSORS else OPTIMIZERS[name](model.parameters())

    class Callback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            replicas.append(digest(model.parameters()))

    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, 25, (800,), generator=generator) for _ in range(2))
    arguments = TrainingArguments(
        str(path),
        learning_rate=0.01,
        gradient_accumulation_steps=MICROBATCHES,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=SAVED_AT,
        per_device_train_batch_size=8,
        max_grad_norm=1.0 if integrated else 0.0,
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    examples: Any = [{"tokens": token, "labels": label} for token, label in zip(tokens, labels, strict=True)]
    trainer = Trainer(model, arguments, train_dataset=examples, optimizers=(optimizer, None))
    if integrated:
        trainer.add_callback(ThinwireCallback(trainer, compressor=name if name in COMPRESSORS else None))
    else:
        thinwire.attach(model, optimizer)
    trainer.add_callback(Callback())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=str(path / f"checkpoint-{SAVED_AT}") if resume else None)
    assert not [each for each in caught if "not as if it had never stopped" in str(each.message)]
    return replicas, about_rank_zero(caught)


def through_trainer(rank: int, world_size: int, name: str, path: Path) -> dict[str, Any]:
    never_stopped, told = trained_by_trainer(name, path / name)
    resumed, _ = trained_by_trainer(name, path / name, resume=True)
    return {"never stopped": never_stopped[SAVED_AT:], "resumed": resumed, "told": told}


def in_trainer(rank: int, world_size: int, names: Names, path: Path) -> tuple[dict[str, Any], list[str]]:
    as_torchrun_does(rank, world_size)
    cases = each_case(rank, world_size, through_trainer, {name: name for name in names}, path)
    return cases, trained_by_trainer("Birder", path / "alone", integrated=False)[1]


@grid
@needs("transformers")
@needs("accelerate")
def test_trainer(names: Names, tmp_path: Path) -> None:
    results = run_ranks(in_trainer, 2, names, tmp_path, timeout=SECONDS, preload=FRAMEWORKS)
    assert_resumed([cases for cases, _ in results])
    assert all(not runs["told"] for cases, _ in results for runs in cases.values())
    assert [[told.partition(" saves")[0] for told in of_rank] for _, of_rank in results] == [["transformers"], []]
