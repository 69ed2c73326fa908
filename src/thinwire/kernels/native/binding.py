"""Makes the Python function of each native kernel.

Three things define it, each written once: the reference's signature, the kernel's declaration in csrc/kernels.def, and
the check of its tensors in `thinwire.kernels.arguments`. A parameter of the declaration is computed from the arguments
by its name; csrc/kernels.def lists the rules. The function is compiled from source, so a call costs no more than one
written by hand, and its signature is that of the reference.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from thinwire.kernels import threads
from thinwire.kernels.bounds import bounds_of
from thinwire.kernels.native.library import Declaration, Parameter

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers of `thinwire_dtype` in csrc/thinwire.h."""

_SUFFIXES = {
    "_dtype": "dtypes[{0}.dtype]",
    "_size": "{0}.numel()",
    "_rows": "{0}.shape[0]",
    "_columns": "{0}.shape[1]",
}
_WORK = {
    "n_runs": "bounds.work",
    "words": "64 * words",
    "rows_columns": "rows.shape[1]",
    "values_size": "values.numel()",
}
"""How many elements a call runs over, by the parameter that says so."""
_IF_NONE = {"beta_b": "beta"}
"""Arguments that are those of another name when they are None."""


def bind(
    declaration: Declaration,
    reference: Callable[..., Any],
    check: Callable[..., Any],
    names: dict[str, Any],
    on_failure: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """The Python function of a kernel.

    Args:
        declaration: the kernel as the library declares it.
        reference: the function of the reference, whose signature it gets.
        check: what checks the tensors; its arguments are some of the reference's.
        names: where the function looks up the kernel, by its name, whenever it is called; and "<name>_on_threads", if
            there is one, with the `_table` of kernels that it is given and the module `_threads`.
        on_failure: called with those of the arguments that it takes when the kernel returns 0.

    Raises:
        ImportError: when a parameter of the declaration follows from no argument of the reference.
    """
    arguments = inspect.signature(reference).parameters
    name = declaration.name
    has_runs = "runs" in arguments
    values = [_value(declaration, parameter, arguments) for parameter in declaration.parameters]
    call = f"{name}({', '.join(values)})"
    if f"{name}_on_threads" in names:
        alone = f"{_work(declaration)} < _threads.LEAST or (_number := _threads.number()) < 2"
        call = f"({call} if {alone} else {_on_threads(name, values)})"
    checking = f"check_{name}({', '.join(_taken_by(check))})"
    body = [f"bounds = {checking}" if has_runs else checking]
    body += [f"if {one} is None: {one} = {other}" for one, other in _IF_NONE.items() if one in arguments]
    if on_failure is not None:
        body += [f"if not {call}:", f"    fail_{name}({', '.join(_taken_by(on_failure))})"]
    elif inspect.signature(reference).return_annotation == "bool":
        body.append(f"return {call} != 0")
    else:
        body.append(f"return {call}")
    source = f"def call_{name}({_header(arguments)}):\n" + "".join(f"    {line}\n" for line in body)
    names |= {f"check_{name}": check, f"fail_{name}": on_failure, "dtypes": DTYPES}
    file = f"<thinwire native kernel {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # shown in tracebacks
    exec(compile(source, file, "exec"), names)
    function = names[f"call_{name}"]
    function.__name__ = function.__qualname__ = name
    function.__doc__ = reference.__doc__
    function.__defaults__, function.__kwdefaults__ = reference.__defaults__, reference.__kwdefaults__
    return function


def prepare(
    declaration: Declaration,
    reference: Callable[..., Any],
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    varying: str,
    names: dict[str, Any],
) -> Callable[[torch.Tensor], Any]:
    """A kernel with all arguments but one given, for calls of a few microseconds.

    The first call checks all arguments. So does a call with a tensor of another dtype, length or kind of memory.

    Args:
        declaration: the kernel as the library declares it.
        reference: the function of the reference.
        function: what `bind` made of both.
        arguments: by the names of the reference. Their tensors must keep their memory.
        varying: the argument that is missing, a gradient or a parameter.
        names: as in `bind`.
    """
    signature = inspect.signature(reference)
    known = signature.parameters
    given = {name: arguments.get(name, parameter.default) for name, parameter in known.items() if name != varying}
    returns_bool = signature.return_annotation == "bool"
    kernel, dtype, numel = None, None, -1

    def call(tensor: torch.Tensor) -> Any:
        nonlocal kernel, dtype, numel
        if (
            kernel is None
            or tensor.dtype is not dtype
            or tensor.numel() != numel
            or not tensor.is_contiguous()
            or not tensor.is_cpu
            or tensor.is_neg()
            or not (pointer := tensor.data_ptr())
        ):
            result = function(**arguments, **{varying: tensor})
            kernel, dtype, numel = make(tensor), tensor.dtype, tensor.numel()
            return result
        found = kernel(pointer)
        return found != 0 if returns_bool else found

    def make(tensor: torch.Tensor) -> Callable[[int], Any]:
        values = [_value(declaration, parameter, known) for parameter in declaration.parameters]
        scope = {**names, **given, varying: tensor, "bounds": bounds_of(declaration.name, given["runs"])}
        for one, other in _IF_NONE.items():
            if scope.get(one, 0) is None:
                scope[one] = scope[other]
        fixed = [
            "pointer" if parameter.name == varying else repr(eval(value, scope))
            for parameter, value in zip(declaration.parameters, values, strict=True)
        ]
        call = f"{declaration.name}({', '.join(fixed)})"
        if f"{declaration.name}_on_threads" in names and eval(_work(declaration), scope) >= threads.LEAST:
            call += f" if (_number := _threads.number()) < 2 else {_on_threads(declaration.name, fixed)}"
        return eval(f"lambda pointer: ({call})", names)

    return call


def _work(declaration: Declaration) -> str:
    """The expression for how many elements a call of a kernel runs over that several threads can share."""
    return next(_WORK[parameter.name] for parameter in declaration.parameters if parameter.name in _WORK)


def _on_threads(name: str, values: Sequence[str]) -> str:
    """The call of a kernel on several threads."""
    return f"{name}_on_threads(_table, _number, {', '.join(values)})"


def _value(declaration: Declaration, parameter: Parameter, arguments: Mapping[str, inspect.Parameter]) -> str:
    """The expression that computes a parameter from the arguments."""
    name = parameter.name
    if name in arguments:
        if parameter.is_pointer:
            return "bounds.pointer" if name == "runs" else _unless_none(arguments[name], f"{name}.data_ptr()", "None")
        return f"float({name})" if "Tensor" in str(arguments[name].annotation) else name
    if name == "n_runs":
        return "bounds.rows"
    if name.startswith("n_") and name[2:] in arguments:
        return f"{name[2:]}.shape[0]"
    if name.startswith("one_minus_") and name[10:] in arguments:
        return f"1.0 - {name[10:]}"
    if name.endswith("_stride") and name[:-7] in arguments:
        # Rows of other types than bytes are declared as `void *`.
        of_bytes = any(one.name == name[:-7] and "uint8_t" in one.type for one in declaration.parameters)
        return f"{name[:-7]}.stride(0)" + ("" if of_bytes else f" * {name[:-7]}.element_size()")
    for suffix, expression in _SUFFIXES.items():
        of = name.removesuffix(suffix)
        if of != name and of in arguments:
            return _unless_none(arguments[of], expression.format(of), "0")
    raise ImportError(
        f"the library's kernel {declaration.name} takes {name}, which follows from no argument of the reference: "
        "install thinwire again"
    )


def _unless_none(argument: inspect.Parameter, expression: str, otherwise: str) -> str:
    if "None" in str(argument.annotation):
        return f"{otherwise} if {argument.name} is None else {expression}"
    return expression


def _header(arguments: Mapping[str, inspect.Parameter]) -> str:
    """The parameter list of a function that takes these arguments."""
    parts: list[str] = []
    for argument in arguments.values():
        if argument.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(argument.name)
    return ", ".join(parts)


def _taken_by(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "device"]
