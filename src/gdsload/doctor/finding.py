"""What a check answers, and what all answers together mean for a load."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from gdsload.backends.posix.engines import ENGINES

YES, PARTLY, NO = "yes", "partly", "no"
VERDICTS = (YES, PARTLY, NO)
BEST_ENGINE = ENGINES[0]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: `verdict` is "yes", "partly" or "no"; `hint` is "" or what helps."""

    name: str
    verdict: str
    detail: str = ""
    hint: str = ""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r} is none of {', '.join(VERDICTS)}")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, in the order in which they are shown."""

    findings: tuple[Finding, ...]

    def verdict(self, name: str) -> str:
        """The verdict on that name, "no" where nothing of that name was looked at."""
        return next((each.verdict for each in self.findings if each.name == name), NO)

    @property
    def exit_code(self) -> int:
        """0: the best road to DRAM works; 1: only slower ones do; 2: none does.

        The best road is direct reads by the first of the engines. Whether reads can be direct is
        judged where a path was given.
        """
        engines = [engine for engine in ENGINES if self.verdict(f"engine {engine}") == YES]
        if not engines:
            return 2
        judged = [each for each in self.findings if each.name.startswith("direct I/O")]
        best = BEST_ENGINE in engines and all(each.verdict == YES for each in judged)
        return 0 if best else 1

    def to_dict(self) -> dict[str, Any]:
        return {"exit_code": self.exit_code, "findings": [asdict(each) for each in self.findings]}

    def summary(self) -> str:
        """One line for each finding, its hint below it, and the verdict on the whole."""
        width = max((len(each.name) for each in self.findings), default=0)
        lines = []
        for each in self.findings:
            lines.append(f"{each.verdict:<6}  {each.name:<{width}}  {each.detail}".rstrip())
            if each.hint and each.verdict != YES:
                lines.append(f"{'':<6}  {'':<{width}}  hint: {each.hint}")
        return "\n".join([*lines, "", _CONCLUSIONS[self.exit_code]])


_CONCLUSIONS = (
    f"The best road to DRAM works: direct reads by engine {BEST_ENGINE}.",
    "Only slower roads to DRAM work: see what is not a yes above.",
    "No road to DRAM works: no engine can read here.",
)


def read_text(root: str, path: str) -> str | None:
    """The text of a small file, stripped; None where it is not there or cannot be read."""
    try:
        with open(os.path.join(root, path), errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None
