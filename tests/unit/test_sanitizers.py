"""`make sanitize` would be silent if nothing was checked: here kernels are made to do what they must not."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import pytest
import torch

from tests.unit.kernel_cases import ISAS, SANITIZED
from thinwire.kernels import native
from thinwire.kernels.native.library import lib

pytestmark = pytest.mark.skipif(not SANITIZED, reason="only the kernels of `make sanitize` watch themselves")

each_isa = pytest.mark.parametrize("isa", ISAS)


def last_words(isa: str, call: Callable[[], object]) -> tuple[int, str]:
    """The exit code of a process that makes a call, and what it says on the way."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            code = 2
            try:
                os.dup2(said.fileno(), 2)
                native.use_isa(isa)
                call()
                code = 0
            finally:
                os._exit(code)  # whatever is raised: a child that went on would run all tests once more, and fork again
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read().decode(errors="replace")


@each_isa
def test_what_is_allowed_passes(isa: str) -> None:
    values = torch.ones(100)
    assert last_words(isa, lambda: native.square_sum(values)) == (0, "")


@each_isa
def test_reading_a_float_too_far_is_seen(isa: str) -> None:
    values = torch.ones(100)
    code, said = last_words(isa, lambda: lib().thinwire_square_sum(values.data_ptr(), 101))
    assert code == 1
    assert "AddressSanitizer: heap-buffer-overflow" in said
    assert "square_sum" in said


@each_isa
def test_writing_a_float_too_far_is_seen(isa: str) -> None:
    v = torch.ones(100)
    code, said = last_words(isa, lambda: lib().thinwire_precondition(v.data_ptr(), 101, 1.0, 0.0, 1.0))
    assert code == 1
    assert "AddressSanitizer: heap-buffer-overflow" in said
    assert "precondition" in said


@each_isa
def test_undefined_behaviour_is_seen(isa: str) -> None:
    """A float at an address that is no multiple of four."""
    values = torch.ones(100)
    code, said = last_words(isa, lambda: lib().thinwire_square_sum(values.data_ptr() + 1, 64))
    assert code == 1
    assert "runtime error: load of misaligned address" in said
