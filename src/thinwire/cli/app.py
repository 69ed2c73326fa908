"""The ``thinwire`` command line: what there is, and who does it."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

try:
    import torch
    import typer

    from thinwire._version import __version__
    from thinwire.cli import bench, demo, soak, testbed
    from thinwire.cli.chaos import command as chaos
    from thinwire.cli.plan import command as plan
    from thinwire.cli.plan import simulate
    from thinwire.cli.selftest import command as selftest
    from thinwire.cli.study import command as study
    from thinwire.kernels import native, ops
except ModuleNotFoundError as error:
    # torch is all the library needs; the command line asks for more, and says which extra brings it.
    if error.name not in {"typer", "rich"}:
        raise
    raise SystemExit(f"the thinwire command needs {error.name!r}: pip install 'thinwire[cli]'") from None
except KeyboardInterrupt:
    raise SystemExit(128 + signal.SIGINT) from None

app = typer.Typer(
    name="thinwire",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    """What a bug report needs: the version, the kernels of this machine, and torch's version."""
    if not wanted:
        return
    try:
        kernels = ops.backend(torch.device("cpu")).name
    except (RuntimeError, ValueError) as error:  # what THINWIRE_KERNELS or THINWIRE_ISA asks for does not exist
        raise typer.BadParameter(str(error)) from None
    of_isa = f" ({native.isa()})" if kernels == "native" else ""
    typer.echo(f"thinwire {__version__}, {kernels} kernels{of_isa}, torch {torch.__version__}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print version, kernels and torch."),
    ] = False,
) -> None:
    """Train over thin wires: 1-bit optimizers in the place of AdamW."""


app.command(name="demo")(demo.demo)
# What follows the script belongs to it.
app.command(name="plan", context_settings={"allow_interspersed_args": False})(plan.plan)
app.add_typer(simulate.app, name="simulate")
app.add_typer(bench.app, name="bench")
app.add_typer(testbed.app, name="testbed")
app.command(name="chaos")(chaos.chaos)
app.command(name="soak")(soak.soak)
app.command(name="selftest")(selftest.selftest)
app.command(name="study")(study.study_command)


def main() -> None:
    """Entry point of the ``thinwire`` script."""
    # By default SIGTERM ends Python on the spot; as an exception it lets a command end its workers, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        app()
    except KeyboardInterrupt:
        # typer turns it into an exit code only while a command runs, and not while it reads the arguments.
        sys.exit(128 + signal.SIGINT)
