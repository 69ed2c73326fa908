"""Kernels on several threads: the bits of one thread, as many threads as torch has, and processes that fork and end.

`kernel_cases.same_everywhere` compares every small case with the reference, on two, three and four threads. The cases
here are large enough that each thread has several turns.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit import markov_cases, quantize_cases, sign_cases
from tests.unit import test_kernels as flat
from tests.unit import test_kernels_node as node
from tests.unit.kernel_cases import SANITIZED, allocation, copy_of, encode_case, on_threads
from thinwire.kernels import native, ops, threads
from thinwire.kernels.threads import Lent
from thinwire.metrics import Meter
from thinwire.transport.connections import Connections
from thinwire.transport.lane import Lane
from thinwire.transport.lane_transport import LaneTransport

pytestmark = pytest.mark.skipif(not native.available(), reason="there are no native kernels")

COUNT = 90_001
"""44 times the 2,048 elements whose sums are taken together, and a tail shorter than a word."""
WORDS = 3 * flat.SIGNAL_BLOCK + 65
PIECES = 5
SOON = 60.0
"""Seconds within which what should happen at once must have happened."""

_FP32: dict[str, Any] = {"grad_dtype": torch.float32, "state_dtype": torch.float32}
_GIVEN: dict[str, Any] = {"grad_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}
_RUNS: dict[str, Any] = {"count": COUNT, "pieces": PIECES}
_LOADED: dict[str, Any] = {"low_dtype": torch.bfloat16, "loaded": True}
CASES: dict[str, list[dict[str, Any]]] = {
    "birder_encode": [encode_case(**_RUNS, seed=1, **_FP32), encode_case(**_RUNS, seed=2, finite=False, **_GIVEN)],
    "birder_direction": [node.direction_case(**_RUNS, seed=1, **_FP32)],
    "birder_apply": [
        flat.apply_case(**_RUNS, seed=1),
        flat.apply_case(**_RUNS, seed=2, workers=5, **_LOADED),
    ],
    "vote_bit": [flat.vote_case(3, WORDS, "some", seed=1), flat.vote_case(4, WORDS, None, seed=2, signal=False)],
    "vote_majority": [flat.majority_case(4, WORDS, "some", seed=1)],
    "vote_count": [flat.count_case(5, WORDS, "some", seed=1), flat.count_case(2, WORDS, "all", seed=2, signal=False)],
    "mean": [node.mean_case(3, COUNT, seed=1, dtype=dtype, finite=False) for dtype in (torch.float32, torch.bfloat16)],
    "dense_apply": [node.dense_case(**_RUNS, seed=1, low_dtype=torch.float16)],
    **{name: [case] for name, case in sign_cases.a_case_of_each(COUNT, PIECES).items()},
    **{name: [case] for name, case in quantize_cases.a_case_of_each(COUNT).items()},
    "markov_encode": [markov_cases.markov_encode_case(**_RUNS, seed=3, momentum=True)],
    "markov_difference": [markov_cases.markov_difference_case(**_RUNS, seed=3)],
    "markov_merge": [markov_cases.markov_merge_case(**_RUNS, workers=3, seed=3)],
    "amsgrad_apply": [markov_cases.amsgrad_case(**_RUNS, seed=3, source=source) for source in (0, 1, 2)],
    "momentum_sum": [markov_cases.momentum_sum_case(**_RUNS, seed=3, grad_dtype=torch.float16)],
}
CASES["adam_apply"].append(sign_cases.adam_case(**_RUNS, seed=4, low_dtype=None, loaded=False))
CASES["momentum_encode"] += [
    sign_cases.momentum_encode_case(**_RUNS, seed=4, **_FP32, shift=0, output=output) for output in (0, 2)
]
CASES["quantize_encode"] += [
    quantize_cases.quantize_encode_case(**_RUNS, seed=5, bits=bits, block=block) for bits, block in ((3, 16), (8, 32))
]
CASES["quantize_decode"].append(quantize_cases.quantize_decode_case(**_RUNS, seed=5, bits=2, block=16))
DIVIDED = [name for name in ops.OPERATIONS if native.on_threads(name)]


def test_the_kernels_of_encode_merge_and_apply_run_on_several_threads() -> None:
    assert set(DIVIDED) == set(CASES) - {"precondition"}


@pytest.mark.parametrize("operation", DIVIDED)
def test_bits_do_not_depend_on_the_number_of_threads(operation: str) -> None:
    for case in CASES[operation]:
        alone = {name: copy_of(argument) for name, argument in case.items()}
        expected = getattr(ops.BACKENDS["native"], operation)(**alone)
        for number in (2, 3, 4):
            shared = {name: copy_of(argument) for name, argument in case.items()}
            with on_threads(number) as kernels:
                result = getattr(kernels, operation)(**shared)
            assert repr(result) == repr(expected), f"{operation} on {number} threads"
            for name, argument in alone.items():
                if isinstance(argument, Tensor):
                    assert torch.equal(allocation(shared[name]), allocation(argument)), f"{name} on {number} threads"


def test_prepared_calls_run_on_several_threads() -> None:
    case = CASES["quantize_encode"][1]
    one, other = ({name: copy_of(argument) for name, argument in case.items()} for _ in range(2))
    grad = one.pop("grad")
    del other["grad"]
    alone = ops.BACKENDS["native"].prepared("quantize_encode", "grad", **one)
    with on_threads(3) as kernels:
        shared = kernels.prepared("quantize_encode", "grad", **other)
        results = [shared(grad) for _ in range(2)]
    assert results == [alone(grad) for _ in range(2)]
    for name, argument in one.items():
        if isinstance(argument, Tensor):
            assert torch.equal(allocation(other[name]), allocation(argument)), name


def test_several_python_threads_call_kernels_at_the_same_time() -> None:
    """As lanes and autograd do. Each has results of its own; there are fewer helpers than calls that want some."""
    names = ["birder_encode", "sign_encode", "quantize_encode", "vote_bit"]
    expected = {name: {key: copy_of(value) for key, value in CASES[name][0].items()} for name in names}
    for name, case in expected.items():
        getattr(ops.BACKENDS["native"], name)(**case)
    wrong: list[str] = []

    def call(name: str) -> None:
        lent = Lent()
        lent.number = 3
        threads.borrow(lent)
        for _ in range(5 if SANITIZED else 30):
            case = {key: copy_of(value) for key, value in CASES[name][0].items()}
            getattr(ops.BACKENDS["native"], name)(**case)
            for key, value in expected[name].items():
                if isinstance(value, Tensor) and not torch.equal(allocation(case[key]), allocation(value)):
                    wrong.append(f"{name}: {key}")

    with on_threads(3):
        callers = [threading.Thread(target=call, args=(name,), daemon=True) for name in names]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(2 * SOON)
    assert not any(caller.is_alive() for caller in callers)
    assert wrong == []


# How many threads -----------------------------------------------------------------------------------------------------

_PROGRAM = """
import os, sys, threading, warnings
import torch
from thinwire.kernels import native, threads

warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # of Python 3.12, by os.fork
of_kernels, default = threads.number(), torch.get_num_threads()
values = torch.arange(1_000_000, dtype=torch.float32)
square_sum = native.KERNELS["square_sum"]
torch.set_num_threads(1)
expected = square_sum(values)

def helpers_of(count):
    before = len(os.listdir("/proc/self/task"))
    square_sum(values[:count])
    return len(os.listdir("/proc/self/task")) - before
"""


def _run(program: str, **environment: str) -> str:
    """What a program prints that must end by itself, without a word on its error output."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM + program],
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | environment,
        capture_output=True,
        text=True,
        timeout=3 * SOON,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc")


@on_linux
def test_a_call_uses_as_many_threads_as_torch_was_asked_for() -> None:
    """Helpers are made when they are first needed, and stay; small calls need none."""
    printed = _run("""
for number in (1, 3, 2, 4):
    torch.set_num_threads(number)
    print(number, threads.number(), helpers_of(threads.LEAST - 1), helpers_of(1_000_000))
""")
    assert printed.splitlines() == ["1 1 0 0", "3 3 0 2", "2 2 0 0", "4 4 0 1"]


@pytest.mark.parametrize("environment", [{}, {"OMP_NUM_THREADS": "1"}], ids=["", "torchrun"])
def test_the_default_is_that_of_torch(environment: dict[str, str]) -> None:
    """torchrun sets OMP_NUM_THREADS=1."""
    of_torch, of_kernels = _run("print(default, of_kernels)", **environment).split()
    assert of_kernels == of_torch
    assert not environment or of_kernels == "1"


def test_a_lane_uses_one_thread_until_it_is_lent_more() -> None:
    lent = Lent()
    lane = Lane(threaded=True, lent=lent)
    seen: list[int] = []

    def look() -> None:
        lane.submit(lambda: seen.append(threads.number()))
        lane.wait()

    look()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with lent.while_waiting():
            look()
    finally:
        torch.set_num_threads(before)
    look()
    assert seen == [1, 3, 1]


def test_lanes_use_the_threads_of_the_training_loop_while_it_waits_for_them() -> None:
    transport = LaneTransport(Connections(None, None), ops.BACKENDS["native"], Meter(), threaded=True)
    lane = transport._lanes[1]
    waits, lent = threading.Event(), []

    def task() -> None:
        waits.wait(SOON)
        for _ in range(int(SOON * 1000)):
            if threads.number() == 3:
                break
            waits.clear()
            waits.wait(0.001)
        lent.append(threads.number())

    lane.submit(task)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        waits.set()
        transport.wait()
    finally:
        torch.set_num_threads(before)
    lane.submit(lambda: lent.append(threads.number()))
    lane.drain()
    transport.close()
    assert lent == [3, 1]


# Processes ------------------------------------------------------------------------------------------------------------


@on_linux
def test_a_forked_child_calls_kernels_with_helpers_of_its_own() -> None:
    """Whatever the threads of its parent were doing when it forked: none of them exist in the child."""
    printed = _run("""
torch.set_num_threads(4)
assert square_sum(values) == expected
done = threading.Event()

def keep_calling():
    while not done.is_set():
        assert square_sum(values) == expected

callers = [threading.Thread(target=keep_calling) for _ in range(2)]
for caller in callers:
    caller.start()

for turn in range(8):
    child = os.fork()
    if child == 0:
        right = square_sum(values) == expected and square_sum(values) == expected
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if square_sum(values) == expected else 1)
        right &= os.waitpid(grandchild, 0)[1] == 0
        os._exit(0 if right and len(os.listdir("/proc/self/task")) == 4 else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    assert square_sum(values) == expected
done.set()
for caller in callers:
    caller.join()
print("done")
""")
    assert printed == "done\n"


def test_a_program_ends_right_after_a_call() -> None:
    assert _run("torch.set_num_threads(4)\nprint(square_sum(values) == expected)\n") == "True\n"


def test_a_program_ends_while_a_daemon_thread_calls_kernels() -> None:
    # So large that the thread is in the kernel nearly all of the time. If Python ends while a function of torch is
    # about to take the GIL again, torch aborts.
    printed = _run("""
torch.set_num_threads(4)
begun = threading.Event()
large = torch.zeros(25_000_000)

def keep_calling():
    while True:
        square_sum(large)
        begun.set()

threading.Thread(target=keep_calling, daemon=True).start()
begun.wait()
print("ends", flush=True)
""")
    assert printed == "ends\n"
