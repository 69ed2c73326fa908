"""Accelerate, Transformers, Lightning and Fabric train with an attached optimizer, to the bit as the plain loop does.

They also send what it sends, with `thinwire.integrations`.

The ranks have what torchrun would have set. The plain loop repeats the batches that the framework has given to the net.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import thinwire
from tests.distributed.common import FRAMEWORKS, MANY_CASES_SECONDS, by_case, digest, each_case, environment
from tests.distributed.framework_runs import SECONDS, as_torchrun_does, needs
from tests.distributed.test_bytes import interface_total
from tests.harness import private_network, run_ranks
from thinwire.testbed import TestbedUnavailable

STEPS = 4


class Pairs(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(64, 8, generator=generator), torch.randn(64, 3, generator=generator)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Net(nn.Module):
    """Returns its loss, and remembers the batches that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 100), nn.Tanh(), nn.Linear(100, 3))
        self.batches: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.batches.append({"x": x.clone(), "y": y.clone()})
        return {"loss": (self.layers(x) - y).square().mean()}


def birder(net: nn.Module) -> thinwire.Birder:
    return thinwire.Birder(net.parameters(), lr=1e-2, topology="flat")


def loop(model: nn.Module, opt: Any, batches: Any, backward: Callable[[Tensor], object] = Tensor.backward) -> None:
    for _, batch in zip(range(STEPS), batches, strict=False):
        backward(model(**batch)["loss"])
        opt.step()
        opt.zero_grad()


def accelerate_wraps_later(net: Net, opt: thinwire.Birder) -> None:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    thinwire.attach(net, opt)
    loop(*accelerator.prepare(net, opt, DataLoader(Pairs(), batch_size=4)), backward=accelerator.backward)


def accelerate_has_wrapped(net: Net, opt: thinwire.Birder) -> None:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    model, wrapped, batches = accelerator.prepare(net, opt, DataLoader(Pairs(), batch_size=4))
    assert wrapped is not opt
    thinwire.attach(model, wrapped)
    loop(model, wrapped, batches, accelerator.backward)


def trainer(net: Net, opt: thinwire.Birder) -> None:
    transformers = importlib.import_module("transformers")
    thinwire.attach(net, opt)
    with tempfile.TemporaryDirectory() as directory:
        arguments = transformers.TrainingArguments(
            output_dir=directory,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=4,
            max_steps=STEPS,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
        )
        transformers.Trainer(model=net, args=arguments, train_dataset=Pairs(), optimizers=(opt, None)).train()


def _fit(net: Net, opt: thinwire.Birder, attach_in: str) -> None:
    lightning: Any = importlib.import_module("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            if attach_in == "configure_optimizers":
                thinwire.attach(self, opt)
            return opt

        def on_train_start(self) -> None:
            if attach_in == "on_train_start":
                wrapped = self.optimizers()
                assert wrapped is not opt
                thinwire.attach(self.trainer.model, wrapped)

    lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(Pairs(), batch_size=4))


def lightning_configures_optimizers(net: Net, opt: thinwire.Birder) -> None:
    _fit(net, opt, "configure_optimizers")


def lightning_starts_training(net: Net, opt: thinwire.Birder) -> None:
    _fit(net, opt, "on_train_start")


def fabric(net: Net, opt: thinwire.Birder) -> None:
    lightning = importlib.import_module("lightning.fabric")
    runner = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    runner.launch()
    model, wrapped = runner.setup(net, opt)
    thinwire.attach(model, wrapped)
    loop(model, wrapped, runner.setup_dataloaders(DataLoader(Pairs(), batch_size=4)), runner.backward)


def trained(rank: int, world_size: int, framework: Callable[[Net, thinwire.Birder], None]) -> tuple[str, str]:
    """The parameters that a framework and the plain loop end with."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    restarts = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    variables = {**{name: str(value) for name, value in numbers.items()}, **torchrun, **restarts}
    net, sent = Net(), []
    opt = birder(net)
    encode = opt._encode_early

    def encode_early(position: int, scale: Any) -> None:
        sent.append(position)
        encode(position, scale)

    opt._encode_early = encode_early  # type: ignore[method-assign]
    with environment(variables), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the frameworks
        framework(net, opt)
    assert sorted(sent) == sorted([*range(4)] * (STEPS - 1)), "backward sends all gradients, from the second step on"
    plain = Net()
    loop(plain, birder(plain), net.batches)
    return digest(net.parameters()), digest(plain.parameters())


HUGGING_FACE = {way.__name__: way for way in (accelerate_wraps_later, accelerate_has_wrapped, trainer)}
LIGHTNING = {way.__name__: way for way in (lightning_configures_optimizers, lightning_starts_training, fabric)}


@pytest.mark.parametrize(
    ("packages", "ways"),
    [(("accelerate", "transformers"), HUGGING_FACE), (("lightning",), LIGHTNING)],
    ids=["hugging_face", "lightning"],
)
def test_a_framework_trains_as_the_plain_loop_does(packages: tuple[str, ...], ways: dict[str, Any]) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} of the extra 'integrations' not installed")
    results = run_ranks(each_case, 2, trained, ways, timeout=MANY_CASES_SECONDS, preload=FRAMEWORKS)
    for name, ranks in by_case(results).items():
        for of_framework, plain in ranks:
            assert of_framework == plain == ranks[0][0], name


# Bytes ----------------------------------------------------------------------------------------------------------------

FIRST, LAST = 3, 13
"""Between these steps bytes are counted."""


class WideNet(nn.Module):
    """A million parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 1000), nn.Tanh(), nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - y).square().mean()}


def counting(params: Any, counts: list[int]) -> thinwire.Birder:
    """An optimizer that reads the interface after two of its steps."""
    optimizer = thinwire.Birder(params, lr=1e-3, topology="flat")

    def after_step(*_: object) -> None:
        if optimizer.metrics().steps in (FIRST, LAST):
            counts.append(interface_total())

    optimizer.register_step_post_hook(after_step)
    return optimizer


def counted_plain(counts: list[int]) -> None:
    net = WideNet()
    optimizer = counting(net.parameters(), counts)
    model = nn.parallel.DistributedDataParallel(net)
    thinwire.attach(model, optimizer)
    for batch in itertools.islice(DataLoader(Pairs(), batch_size=4), LAST):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def counted_in_accelerate(counts: list[int]) -> None:
    integration = importlib.import_module("thinwire.integrations.accelerate")
    accelerator, net = importlib.import_module("accelerate").Accelerator(cpu=True), WideNet()
    optimizer = counting(net.parameters(), counts)
    integration.attach(accelerator, net, optimizer)
    model, optimizer, batches = accelerator.prepare(net, optimizer, DataLoader(Pairs(), batch_size=2))
    for batch in itertools.islice(batches, LAST):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def counted_in_trainer(counts: list[int]) -> None:
    transformers = importlib.import_module("transformers")
    integration = importlib.import_module("thinwire.integrations.transformers")
    net = WideNet()
    with tempfile.TemporaryDirectory() as directory:
        settings = {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True}
        arguments = transformers.TrainingArguments(
            directory, use_cpu=True, per_device_train_batch_size=2, max_steps=LAST, **settings
        )
        optimizers = (counting(net.parameters(), counts), None)
        trainer = transformers.Trainer(model=net, args=arguments, train_dataset=Pairs(), optimizers=optimizers)
        trainer.add_callback(integration.ThinwireCallback(trainer))
        trainer.train()


def counted_in_lightning(counts: list[int]) -> None:
    lightning: Any = importlib.import_module("lightning.pytorch")
    integration = importlib.import_module("thinwire.integrations.lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = WideNet()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return counting(self.parameters(), counts)

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=integration.ThinwireStrategy(), max_steps=LAST, **off
    )
    trainer.fit(Module(), DataLoader(Pairs(), batch_size=2))


COUNTED = {
    way.__name__: way for way in (counted_plain, counted_in_accelerate, counted_in_trainer, counted_in_lightning)
}


def counted(rank: int, world_size: int, way: Callable[[list[int]], None]) -> int:
    as_torchrun_does(rank, world_size)
    counts: list[int] = []
    way(counts)
    assert len(counts) == 2
    return counts[1] - counts[0]


@needs("accelerate")
@needs("lightning")
@needs("transformers")
def test_frameworks_send_what_the_plain_loop_sends() -> None:
    try:
        with private_network() as network:
            ranks = run_ranks(each_case, 2, counted, COUNTED, timeout=SECONDS, network=network)
    except TestbedUnavailable as error:
        pytest.skip(str(error))
    for sent in ranks:
        for name, count in sent.items():
            # A busy machine sends more acknowledgements: 5 % more bytes. Dense gradients are 32 times as many.
            assert 0.9 < count / sent["counted_plain"] < 1.2, name
