"""The table of architectures in docs/from-pretrained.md is what the code says it is.

Run as a program, it writes the table.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import pytest
import transformers

import gdsload
import tinymodels

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "from-pretrained.md"
TABLE = re.compile(r"(<!-- table: [^>]*-->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def table(directory: Path) -> str:
    """The table for the transformers that is installed."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    lines = [
        f"With transformers {transformers.__version__}:",
        "",
        "| architecture | class | keep | transient | conversions |",
        "|---|---|---:|---:|---|",
    ]
    for name, (class_name, _) in tinymodels.ARCHITECTURES.items():
        tinymodels.build(name).save_pretrained(directory / name)
        model = gdsload.from_pretrained(directory / name)
        labels = gdsload.last_report().labels
        kinds = {
            type(operation).__name__
            for conversion in getattr(model, "_weight_conversions", None) or ()
            for operation in getattr(conversion, "operations", ())
        }
        if any(not hasattr(c, "operations") for c in getattr(model, "_weight_conversions", ())):
            kinds.add("renamed")
        lines.append(
            f"| {name} | `{class_name}` | {labels['keep']} | {labels['transient']}"
            f" | {', '.join(sorted(kinds, key=str.lower))} |"
        )
    return "\n".join(lines) + "\n"


def test_the_table_is_up_to_date(tmp_path: Path) -> None:
    found = TABLE.search(DOCUMENT.read_text())
    assert found is not None
    written_with = re.search(r"With transformers (\S+):", found[2])
    assert written_with is not None
    if written_with[1] != transformers.__version__:
        pytest.skip(f"the table was written with transformers {written_with[1]}")
    assert found[2] == table(tmp_path), f"run `python tests/{Path(__file__).name}`"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        text = table(Path(scratch))
    DOCUMENT.write_text(TABLE.sub(lambda m: m[1] + text + m[3], DOCUMENT.read_text()))
    sys.stdout.write(f"{DOCUMENT}: {text.count(chr(10)) - 4} architectures\n")
