"""`Finding`, the result of one check, and `Diagnosis`, the result of all."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from gdsload.backends.posix.engines import ENGINES

YES, PARTLY, NO = "yes", "partly", "no"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `verdict` is "yes", "partly" or "no"; `hint` is a remedy or ""."""

    name: str
    verdict: str
    detail: str = ""
    hint: str = ""

    def __post_init__(self) -> None:
        if self.verdict not in (YES, PARTLY, NO):
            raise ValueError(f"verdict {self.verdict!r} is none of {YES}, {PARTLY}, {NO}")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, in the order of the output."""

    findings: tuple[Finding, ...]

    def verdict(self, name: str) -> str:
        """The verdict of the finding with this name, "no" if there is none."""
        return next((each.verdict for each in self.findings if each.name == name), NO)

    @property
    def exit_code(self) -> int:
        """0: the fastest I/O path to DRAM works; 1: only slower ones work; 2: none works.

        The fastest path is direct I/O with the first engine. Without a path to check, direct I/O is
        assumed to work.
        """
        works = [self.verdict(f"engine {engine}") == YES for engine in ENGINES]
        direct = all(
            each.verdict == YES for each in self.findings if each.name.startswith("direct I/O")
        )
        return 0 if works[0] and direct else 1 if any(works) else 2

    def to_dict(self) -> dict[str, Any]:
        """The output of `doctor --json`."""
        return {"exit_code": self.exit_code, "findings": [asdict(each) for each in self.findings]}

    def summary(self) -> str:
        """One line for each finding, its hint below it, and the conclusion."""
        width = max((len(each.name) for each in self.findings), default=0)
        lines = []
        for each in self.findings:
            lines.append(f"{each.verdict:<6}  {each.name:<{width}}  {each.detail}".rstrip())
            if each.hint and each.verdict != YES:
                lines.append(f"{'':<6}  {'':<{width}}  hint: {each.hint}")
        return "\n".join([*lines, "", _CONCLUSIONS[self.exit_code]])


_CONCLUSIONS = (
    f"The fastest path to DRAM works: direct reads by engine {ENGINES[0]}.",
    "Only slower paths to DRAM work: see the lines above that are not yes.",
    "No path to DRAM works: no engine can read here.",
)


def read_text(root: str, path: str) -> str | None:
    """The stripped text of a small file; None if it cannot be read."""
    try:
        with open(os.path.join(root, path), errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None
