"""What became of every attention site, for the user to read."""

from __future__ import annotations

import dataclasses
from collections import Counter

REWRITTEN, SKIPPED = "rewritten", "skipped"


@dataclasses.dataclass(frozen=True)
class SiteReport:
    """One attention site of a model."""

    path: str
    """Qualified name of the attention module."""
    cls: str
    """Class of the attention module."""
    status: str
    """``"rewritten"`` or ``"skipped"``."""
    checked: bool
    """Whether the installed site was compared with the original module (False on meta weights)."""
    reason: str
    """Why it was skipped; empty when rewritten."""
    kv_heads: int
    """Key-value heads, each with a route of its own."""
    head_dim: int
    """Size of a key head."""
    implementation: str
    """The kernel that ``auto`` takes on the site's device, or what a skipped site runs."""


@dataclasses.dataclass(frozen=True)
class Report:
    """All attention sites of a model in module order; prints as a table."""

    sites: tuple[SiteReport, ...]

    @property
    def rewritten(self) -> tuple[SiteReport, ...]:
        """The rewritten sites."""
        return tuple(site for site in self.sites if site.status == REWRITTEN)

    @property
    def skipped(self) -> tuple[SiteReport, ...]:
        """The sites that stay as they were."""
        return tuple(site for site in self.sites if site.status == SKIPPED)

    def summary(self) -> str:
        """One line: how many sites were rewritten, and why the others were not."""
        line = f"{len(self.rewritten)} of {len(self.sites)} attention sites rewritten"
        reasons = Counter(site.reason for site in self.skipped)
        parts = [f"{count} skipped: {reason}" for reason, count in reasons.items()]
        return "; ".join([line, *parts])

    def __str__(self) -> str:
        heads = ("path", "class", "status", "checked", "kv heads", "head size", "implementation")
        rows = [
            (
                site.path,
                site.cls,
                site.status if not site.reason else f"{site.status}: {site.reason}",
                "yes" if site.checked else "no",
                str(site.kv_heads),
                str(site.head_dim),
                site.implementation,
            )
            for site in self.sites
        ]
        widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [heads, *rows]
        ]
        return "\n".join([*lines, self.summary()])
