"""The report of `thinwire selftest --markdown`, whatever the machine and the tracebacks say."""

from __future__ import annotations

from thinwire.cli.selftest.results import FAILED, LawResult, SelftestResults


def test_nothing_leaves_its_cell_or_its_block() -> None:
    complaint = "before\n```\n<img src=x>\n````\nafter"
    text = SelftestResults(
        device="cpu",
        ranks=2,
        quick=False,
        machine={"cpu": "<b>a | b\\</b>\n`code` *x* [y](z) & more"},
        laws=[LawResult(1, "A title", "This.", FAILED, 1.5, [complaint], [])],
        kernels=[],
        steps=[],
        errors={},
    ).markdown()
    assert r"| cpu | &lt;b&gt;a \| b\\&lt;/b&gt; \`code\` \*x\* \[y\](z) &amp; more |" in text.splitlines()
    # The fence is longer than any in the text, so that only its own end ends it.
    assert f"`````text\n{complaint}\n`````" in text
