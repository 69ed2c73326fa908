"""Accelerate, Transformers, Lightning and Fabric train with an attached optimizer, to the bit as the plain loop does.

The ranks have what torchrun would have set. The plain loop repeats the batches that the framework has given to the net.
"""

from __future__ import annotations

import importlib
import importlib.util
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
from tests.harness import run_ranks

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
