"""The roofline on paper says what kernels are really given, what ranks really send, and what the document has."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from benchmarks import roofline
from benchmarks.roofline_kernels import FORMS, METHODS, TILE, WORKERS, YARDSTICK, Form, Kernel, local_step
from tests.distributed.stages import PAPER
from tests.harness import run_ranks
from thinwire.cli.stages import MOSTLY_LOCAL, WARMED_UP
from thinwire.kernels import ops, reference
from thinwire.transport.layout import WORD, Layout, bucket_elements

DOCUMENT = Path(__file__).parents[2] / "docs" / "gpu-roofline.md"
MARK = "<!-- What follows is the output of `python -m benchmarks.roofline --markdown`. -->\n\n"

ELEMENTS = WORKERS * WORD * 512
"""Of one parameter: shards of many words, next to which headers are nothing."""
STEPS = 22
"""Until 0/1 Adam has synchronised after local steps; others have a few."""
ROOM = 0.04
"""Packets have more in them than what kernels look at: headers, scales, quiet words."""
SECONDS = 300
"""A busy machine is no finding."""
NEGLIGIBLE = 0.01
"""Bytes an element: scales, sums and tables of runs are less."""
IN_PART = {"activity_refresh", "any_of"}
"""They are given whole packets, and touch the words of a roll call."""
OF_PACKETS = {"packet_seal", "packet_check"}
CHECKSUMS = {*OF_PACKETS, "crc32c"}
"""On a CPU a packet is sealed and checked by the host, but for its checksum."""
OF_LITTLE = {"shard_scale", "clear_words"}
"""They read a few words, and as a rule write as few."""

VISIBLE = {"lr": 0.01}
"""Steps that every dtype can see."""
RUNS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{
        f"Birder, {downlink}, {name} state": (thinwire.Birder, {"downlink": downlink, "state_dtype": dtype})
        for downlink in ("bit", "majority", "votes")
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    },
    "1-bit Adam, fp32 errors": (thinwire.OneBitAdam, {**WARMED_UP, **VISIBLE, **PAPER}),
    "1-bit Adam, bf16 errors": (thinwire.OneBitAdam, {**WARMED_UP, **VISIBLE, **PAPER, "error_dtype": torch.bfloat16}),
    "1-bit Adam, warm-up": (thinwire.OneBitAdam, PAPER),
    "0/1 Adam, synchronising step": (thinwire.ZeroOneAdam, {**MOSTLY_LOCAL, **VISIBLE}),
    "0/1 Adam, local step": (thinwire.ZeroOneAdam, {**MOSTLY_LOCAL, **VISIBLE}),
    "1-bit LAMB": (thinwire.OneBitLamb, {**WARMED_UP, **VISIBLE}),
    "CD-Adam": (thinwire.CDAdam, {}),
}
DERIVED = {YARDSTICK, *(name for name, method in METHODS.items() if method.sends < 1)}
"""Not a thinwire optimizer, and the mean of others."""

Key = tuple[str, frozenset[str]]
"""An operation, and which of its large arguments it was given."""


@dataclass
class Call:
    """What a kernel was given: how many elements to work on, and bytes an element by argument; and what it changed."""

    key: Key
    covered: float
    sizes: dict[str, float]
    changed: set[str]


@dataclass
class Step:
    calls: list[Call]
    bytes_sent: int


def test_every_method_is_run() -> None:
    assert set(RUNS) | DERIVED == set(METHODS)


@pytest.mark.timeout(SECONDS)
def test_lists_what_real_steps_move() -> None:
    runs = run_ranks(_record, WORKERS, timeout=SECONDS)[0]
    wrong: list[str] = []
    for (name, form_name), steps in runs.items():
        form = next(form for form in FORMS if form.name == form_name)
        wrong += [f"{name}, {form_name}: {what}" for what in _differences(METHODS[name].kernels(form), steps, name)]
        if name == "0/1 Adam, local step":
            first = local_step(form, first=True)
            wrong += [f"{name}, the first, {form_name}: {what}" for what in _differences(first, steps, name)]
    assert not wrong, "\n".join(wrong)


def _differences(kernels: list[Kernel], steps: list[Step], name: str) -> list[str]:
    """In what no step, or the last that calls the right kernels, is not as listed."""
    by_key: dict[Key, Kernel] = {}
    for kernel in filter(_is_operation, kernels):
        before = by_key.get(_key(kernel))
        by_key[_key(kernel)] = kernel if before is None else replace(kernel, share=kernel.share + before.share)
    wanted = set(by_key)
    like = [step for step in steps if {call.key for call in step.calls if call.key[0] not in CHECKSUMS} == wanted]
    if not like:
        return [f"no step calls {sorted(map(str, wanted))}: the last one {_ops(steps[-1])}"]
    wrong: list[str] = []
    for key, kernel in by_key.items():
        calls = [call for call in like[-1].calls if call.key == key]
        # A map or a momentum may be settled by now: what a kernel has ever changed is what it writes.
        changed = {operand for step in steps for call in step.calls if call.key == key for operand in call.changed}
        # Words of a few bits may be right before.
        if changed != set(kernel.writes) and not (kernel.name in IN_PART and changed <= set(kernel.writes)):
            wrong.append(f"{kernel.name} changes {sorted(changed)}")
        share = sum(call.covered for call in calls) / ELEMENTS
        if share != pytest.approx(kernel.share, rel=ROOM, abs=1e-3):
            wrong.append(f"{kernel.name} covers {share} of the elements")
        for operand, size in calls[0].sizes.items() if kernel.name not in IN_PART else ():
            said = [listed[operand] for listed in (kernel.reads, kernel.writes) if operand in listed]
            if any(one != pytest.approx(size, rel=ROOM) for one in said):
                wrong.append(f"{kernel.name} is given {size} bytes an element of {operand}, listed are {said}")
    sealed = sum(kernel.share * sum(kernel.reads.values()) for kernel in kernels if kernel.name in OF_PACKETS)
    summed = sum(call.covered for call in like[-1].calls if call.key[0] in CHECKSUMS) / ELEMENTS
    if summed != pytest.approx(sealed, rel=ROOM, abs=5e-3):  # the last word and an empty packet have headers too
        wrong.append(f"checksums are of {summed} bytes an element, listed are {sealed}")
    sent = roofline.wire_bytes(METHODS[name], Layout([ELEMENTS], WORKERS, bucket_elements(None, ELEMENTS)))
    if METHODS[name].payload is not None and like[-1].bytes_sent != sent:
        wrong.append(f"{like[-1].bytes_sent} bytes are sent, {sent} listed")
    return wrong


def _key(kernel: Kernel) -> Key:
    return kernel.name, frozenset({*kernel.reads, *kernel.writes})


def _is_operation(kernel: Kernel) -> bool:
    names = {"any_of", *(field.name for field in fields(ops.Kernels))}
    return kernel.name in names - CHECKSUMS - OF_LITTLE


def _ops(step: Step) -> list[str]:
    return [f"{name} of {sorted(operands)}" for name, operands in {call.key for call in step.calls}]


# In the ranks ---------------------------------------------------------------------------------------------------------


def _record(rank: int, _: int) -> dict[tuple[str, str], list[Step]]:
    """The steps of all runs, with parameters and gradients of both forms, on rank 0."""
    calls: list[Call] = []
    recording = _recording(calls)
    ops.backend = lambda _: recording
    runs: dict[tuple[str, str], list[Step]] = {}
    for form in FORMS:
        dtype = torch.bfloat16 if form.low else torch.float32
        for name, (optimizer_class, settings) in RUNS.items():
            parameter = nn.Parameter(torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1)).to(dtype))
            optimizer = optimizer_class([parameter], **settings)
            steps: list[Step] = []
            for step in range(STEPS if optimizer_class is thinwire.ZeroOneAdam else 5):
                noise = torch.Generator().manual_seed(10 * step + rank)
                parameter.grad = torch.randn(ELEMENTS, generator=noise).to(dtype)
                calls.clear()
                before = optimizer.metrics().bytes_sent
                optimizer.step()
                steps.append(Step(list(calls), optimizer.metrics().bytes_sent - before))
            runs[name, form.name] = steps
    return runs if rank == 0 else {}


def _recording(calls: list[Call]) -> ops.Kernels:
    native = ops.BACKENDS["native"]
    names = [field.name for field in fields(ops.Kernels) if field.name not in {"name", *OF_LITTLE}]
    return replace(native, **{name: _recorded(name, getattr(native, name), calls) for name in names})


def _recorded(name: str, operation: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    signature = inspect.signature(getattr(reference, name))

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
        covered = _covered(name, arguments)
        sizes = {key: _bytes_an_element(key, tensor, covered) for key, tensor in tensors.items()}
        large = {key for key, size in sizes.items() if size >= NEGLIGIBLE and key != "runs"}
        if "x" in arguments and "low" not in tensors:
            assert arguments["x"].dtype == torch.float32
        before = {key: tensors[key].clone() for key in large}
        result = operation(*args, **kwargs)
        changed = {key for key in large if not torch.equal(_bits(before[key]), _bits(tensors[key]))}
        called = "any_of" if name == "vote_bit" and arguments["active"] is None else name
        calls.append(Call((called, frozenset(large)), covered, {key: sizes[key] for key in large}, changed))
        return result

    return call


def _covered(name: str, arguments: dict[str, Any]) -> float:
    """How many elements a call works on; bytes, for a checksum."""
    if "runs" in arguments:
        return int(arguments["runs"][:, 2].sum())
    if "words" in arguments:
        return WORD * arguments["words"]
    if name == "activity_refresh":
        return WORD * arguments["shard_words"] * arguments["shards"] / arguments["period"]
    if name == "activity_update":
        return WORD * arguments["shard_words"] * len(arguments["answers"])
    return arguments["out" if name == "mean" else next(iter(arguments))].numel()


def _bytes_an_element(name: str, tensor: Tensor, covered: float) -> float:
    elements = tensor.numel() * (WORD if tensor.dtype == torch.int64 else 1)
    # What spans the flat space is touched where the call works.
    whole = elements == ELEMENTS and tensor.dtype != torch.uint8 and name != "rows"
    return tensor.numel() * tensor.element_size() / (ELEMENTS if whole else covered)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


# Beside thinwire ------------------------------------------------------------------------------------------------------


def test_yardstick_is_what_torchs_adamw_keeps() -> None:
    parameter = nn.Parameter(torch.ones(ELEMENTS))
    parameter.grad = torch.ones(ELEMENTS)
    adamw = torch.optim.AdamW([parameter], fused=True)
    adamw.step()
    state = adamw.state[parameter]
    kept = [parameter, state["exp_avg"], state["exp_avg_sq"]]
    written = sum(tensor.numel() * tensor.element_size() for tensor in kept) / ELEMENTS
    assert roofline.moved(METHODS[YARDSTICK], FORMS[0]) == (written + parameter.grad.element_size(), written)


def test_models_are_as_large_as_they_are_called() -> None:
    assert [round(model.elements / 1e6) for model in roofline.MODELS] == [109, 1316]


def test_sums_and_launches_follow_the_layout() -> None:
    # Two parameters in one bucket of 4 shards of 2 tiles; the second one reaches over three of them.
    model = roofline.Model("small", [3 * TILE, 5 * TILE])
    form = Form("fp32", 4.0)
    assert model.longest_runs == [2, 2]
    assert model.longest_owned_runs == [2]
    method = roofline.METHODS["1-bit Adam, fp32 errors"]
    tiles = 2 + 2 + 2  # of both parts, and of the owner's shard
    assert roofline.sum_seconds(method, form, model) == pytest.approx(tiles * roofline.SECONDS_PER_TILE)
    each = Counter[str]()
    for kernel in method.kernels(form):
        each[kernel.each] += kernel.launches
    of_sums = 2 + 1  # of both parts, and of the owner
    assert roofline.launches(method, form, model) == 2 * each["part"] + 4 * each["shard"] + each["bucket"] + of_sums


def test_compression_pays_just_below_the_rate_that_is_printed() -> None:
    """Where kernels take as long as the wire saves, both ways take equally long."""
    method, form, model = METHODS["Birder, bit, fp32 state"], FORMS[0], roofline.MODELS[0]
    table = next(table for table in roofline.tables() if table.title.startswith("Break-even"))
    row = next(row for row in table.rows if row[0] == "Birder, bit, fp32 state")
    rate = 1e9 * float(row[table.header.index("110 M, A100, memory only")].replace(",", ""))
    ours = roofline.kernel_seconds(method, form, model, "A100") + 8 * roofline.wire_bytes(method, model.layout) / rate
    assert ours == pytest.approx(8 * roofline.all_reduce_bytes(model.elements, 4.0) / rate, rel=1e-3)


def test_document_is_what_the_command_prints() -> None:
    _, mark, printed = DOCUMENT.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{DOCUMENT.name} has no line {MARK!r}"
    assert printed == roofline.markdown() + "\n", "run `python -m benchmarks.roofline --markdown` and paste it"
