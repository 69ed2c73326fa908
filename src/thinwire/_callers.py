"""Who called thinwire: warnings point at the user's own line, not at torch or a framework in between."""

from __future__ import annotations

import inspect
import warnings

_BETWEEN = (
    *("thinwire", "torch", "accelerate", "transformers", "lightning", "pytorch_lightning", "lightning_fabric"),
    *("contextlib", "functools"),
)
"""Packages that call thinwire for the user."""
_WRAPPERS = ("thinwire.", "torch.", "accelerate.optimizer", "functools", "contextlib")
"""Modules that only pass a call of an optimizer on."""


def warn_user(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Give a warning at the innermost line that is neither in thinwire nor in torch or a framework."""
    modules = _calling_modules()
    users = [i for i, module in enumerate(modules) if module.partition(".")[0] not in _BETWEEN]
    # Level 1 is this function. Without a user, such as in a framework's own command, take the outermost line.
    warnings.warn(message, category, stacklevel=2 + (users[0] if users else len(modules) - 1))


def calling_module() -> str:
    """The innermost module that called thinwire, other than torch and wrappers of optimizers; "" without one."""
    modules = _calling_modules()
    return next((module for module in modules if not module.startswith(_WRAPPERS)), "")


def _calling_modules() -> list[str]:
    """The modules of all callers of the function that calls this one, from the inside out."""
    frame, modules = inspect.currentframe(), []
    while frame is not None:
        modules.append(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back
    return modules[2:]
