"""`Finding`, the result of one check, and `Diagnosis`, the result of all."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from gdsload.backends.posix.engines import ENGINES
from gdsload.errors import one_line

Verdict = Literal["yes", "partly", "no"]
YES: Verdict = "yes"
PARTLY: Verdict = "partly"
NO: Verdict = "no"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        name: What was checked.
        verdict: "yes", "partly" or "no".
        detail: What was found.
        hint: A remedy, or "".
        needs: The name of another finding. If that is "no", the summary shows this one only if it
            is "yes".
    """

    name: str
    verdict: Verdict
    detail: str = ""
    hint: str = ""
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, in the order of the output."""

    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0: the default path to DRAM works; 1: only slower ones work; 2: none works.

        The default path consists of the first engine and direct I/O. Direct I/O that could not be
        tried is assumed to work, but not if the storage of the path did not answer.
        """
        verdicts = {each.name: each.verdict for each in self.findings}
        works = [verdicts.get(f"engine {engine}") == YES for engine in ENGINES]
        direct = all(verdicts[name] != NO for name in verdicts if name.startswith("direct I/O"))
        return 0 if works[0] and direct else 1 if any(works) else 2

    def to_dict(self) -> dict[str, Any]:
        """The output of `doctor --json`."""
        return {"exit_code": self.exit_code, "findings": [asdict(each) for each in self.findings]}

    def summary(self) -> str:
        """One line for each finding, its hint below it, and the conclusion."""
        absent = {each.name for each in self.findings if each.verdict == NO}
        shown = [one for one in self.findings if one.verdict == YES or one.needs not in absent]
        short = [len(each.name) for each in shown if len(each.name) <= _NAME_COLUMNS]
        width = max(short, default=0)
        lines = []
        for each in shown:
            line = f"{each.verdict:<6}  {one_line(each.name):<{width}}  {one_line(each.detail)}"
            lines.append(line.rstrip())
            if each.hint and each.verdict != YES:
                lines.append(f"{'':<6}  {'':<{width}}  hint: {one_line(each.hint)}")
        if left_out := len(self.findings) - len(shown):
            lines.append(f"{'':<6}  {left_out} more about GPUs: gdsload doctor --json")
        conclusion = _CONCLUSIONS[self.exit_code]
        tried = {one.verdict for one in self.findings if one.name.startswith("direct I/O")}
        if self.exit_code == 0 and YES not in tried:
            conclusion = f"Reads by engine {ENGINES[0]} work; direct I/O was not tried."
        return "\n".join([*lines, "", conclusion])


_NAME_COLUMNS = 24  # longer names, such as paths, do not widen the column
_CONCLUSIONS = (
    f"The default path to DRAM works: engine {ENGINES[0]}, through the page cache and direct.",
    "Only slower paths to DRAM work: see the lines above that are not yes.",
    "No path to DRAM works: no engine can read here.",
)
