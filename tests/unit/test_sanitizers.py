"""Kernels that read and write beyond their memory are reported: otherwise `make sanitize` would prove nothing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import pytest
import torch

from tests.unit.kernel_cases import ISAS, SANITIZED
from thinwire.kernels import native

pytestmark = pytest.mark.skipif(not SANITIZED, reason="only the kernels of `make sanitize` check their accesses")

each_isa = pytest.mark.parametrize("isa", ISAS)


def run_in_child(isa: str, call: Callable[[], object]) -> tuple[int, str]:
    """The exit code and the error output of a child process that makes a call."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            code = 2
            try:
                os.dup2(output.fileno(), 2)
                native.use_isa(isa)
                call()
                code = 0
            finally:
                os._exit(code)  # even on an exception: a child that returned would run all tests again
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read().decode(errors="replace")


@each_isa
def test_what_is_allowed_passes(isa: str) -> None:
    values = torch.ones(100)
    assert run_in_child(isa, lambda: native.KERNELS["square_sum"](values)) == (0, "")


@each_isa
def test_reading_a_float_too_far_is_seen(isa: str) -> None:
    values = torch.ones(100)
    code, output = run_in_child(isa, lambda: native.raw("square_sum")(values.data_ptr(), 101))
    assert code == 1
    assert "AddressSanitizer: heap-buffer-overflow" in output
    assert "square_sum" in output


@each_isa
def test_writing_a_float_too_far_is_seen(isa: str) -> None:
    v = torch.ones(100)
    code, output = run_in_child(isa, lambda: native.raw("precondition")(v.data_ptr(), 101, 1.0, 0.0, 1.0))
    assert code == 1
    assert "AddressSanitizer: heap-buffer-overflow" in output
    assert "precondition" in output


@each_isa
def test_undefined_behaviour_is_seen(isa: str) -> None:
    """A float at an address that is no multiple of four."""
    values = torch.ones(100)
    code, output = run_in_child(isa, lambda: native.raw("square_sum")(values.data_ptr() + 1, 64))
    assert code == 1
    assert "runtime error: load of misaligned address" in output
