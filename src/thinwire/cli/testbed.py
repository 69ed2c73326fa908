"""``thinwire testbed``: a command on several hosts with slow links, all of them on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from thinwire.cli.options import MOST_RANKS, checked_by
from thinwire.testbed import Testbed, TestbedUnavailable, check_ranks, parse_delay, parse_rate, remove_leftovers

app = typer.Typer(help="Slow networks on this machine, for any command.", no_args_is_help=True)


def _check_ranks(ranks: int) -> None:
    check_ranks(ranks)
    if ranks > MOST_RANKS:
        raise ValueError(f"ranks must be at most {MOST_RANKS}, got {ranks}")


# What follows the command's name belongs to it, with or without `--` before it.
@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="What every rank runs, with its arguments.")],
    hosts: Annotated[int, checked_by(Testbed, "Hosts, each with a link of its own to one switch.")] = 2,
    ranks: Annotated[int, checked_by(_check_ranks, "Processes per host.")] = 1,
    rate: Annotated[
        str, checked_by(parse_rate, "Rate of each host's link: 100mbit, 1gbit, ... or unlimited.")
    ] = "unlimited",
    delay: Annotated[
        str | None, checked_by(parse_delay, "How long a packet travels: 5ms, ... Needs a kernel with netem.")
    ] = None,
) -> None:
    """Run a command on several hosts as torchrun would, e.g. ``thinwire testbed run --rate 1gbit -- python train.py``.

    Ends with the exit code of the first rank that fails, and prints how many bytes left each host.
    """
    with _unavailable_said(), Testbed(hosts, rate=rate, delay=delay) as testbed:
        code = testbed.run(command, ranks=ranks)
        for host, sent in zip(testbed.hosts, testbed.bytes_sent(), strict=True):
            typer.echo(f"host {host.index} ({host.address}): {sent:,} bytes sent", err=True)
    raise typer.Exit(code)


@app.command()
def clean() -> None:
    """Remove the namespaces that killed runs left behind. The next run does the same."""
    with _unavailable_said():
        removed = remove_leftovers()
    for namespace in removed:
        typer.echo(f"removed {namespace}")
    if not removed:
        typer.echo("nothing to remove")


@contextmanager
def _unavailable_said() -> Iterator[None]:
    try:
        yield
    except TestbedUnavailable as error:
        typer.echo(f"thinwire testbed: {error}", err=True)
        raise typer.Exit(2) from None
