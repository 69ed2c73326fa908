"""The ``thinwire`` command line: what there is, and who does it."""

from __future__ import annotations

import signal
import sys

try:
    import typer

    from thinwire.cli import bench, demo, soak, testbed
    from thinwire.cli.chaos import command as chaos
    from thinwire.cli.selftest import command as selftest
    from thinwire.cli.study import command as study
except ModuleNotFoundError as error:
    # torch is all the library needs; the command line asks for more, and says which extra brings it.
    if error.name not in {"typer", "rich"}:
        raise
    raise SystemExit(f"the thinwire command needs {error.name!r}: pip install 'thinwire[cli]'") from None
except KeyboardInterrupt:
    raise SystemExit(128 + signal.SIGINT) from None

app = typer.Typer(
    name="thinwire",
    help="Train over thin wires: 1-bit optimizers in the place of AdamW.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

app.command(name="demo")(demo.demo)
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
