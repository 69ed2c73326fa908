"""What `make docs` changes in pages before it writes them."""

from __future__ import annotations

from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Show one colon where a docstring introduces a block of code by the two of reStructuredText."""
    return html.replace("::</p>", ":</p>")
