"""`thinwire simulate`: clusters that are not at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.options import output_file
from thinwire.cli.plan import buckets as bucket_table
from thinwire.cli.plan import commit as commit_table
from thinwire.cli.plan import papers as paper_tables

app = typer.Typer(help="Predict steps on clusters that are not at hand.", no_args_is_help=True)


@app.command()
def papers(
    figure: Annotated[Path | None, output_file("Write the curves to this file, a PNG.")] = None,
) -> None:
    """Predict the papers' clusters (8 hosts of 8 GPUs), and the same methods on up to 1,024 hosts, as Markdown."""
    typer.echo(paper_tables.markdown(), nl=False)
    if figure is not None:
        paper_tables.write_figure(figure)
        typer.echo(f"Wrote {figure}", err=True)


@app.command()
def commit() -> None:
    """Predict what the commit round costs on links with latency, as Markdown: 4 hosts, 7.2 M parameters, 1 Gbit/s."""
    typer.echo(commit_table.markdown(), nl=False)


@app.command()
def buckets() -> None:
    """Predict steps with models cut into buckets in several ways, as Markdown: 4 hosts, 7.2 M and 50 M parameters."""
    typer.echo(bucket_table.markdown(), nl=False)
