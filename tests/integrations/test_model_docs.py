"""The tables in docs/from-pretrained.md, of quantizers and of architectures, are what the code and
its tests say. `PYTHONPATH=tests python tests/integrations/test_model_docs.py` writes them.
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

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "from-pretrained.md"
TABLE = re.compile(r"(<!-- table: ([a-z]+)[^>]*-->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
# What test_model_quantized.py loads of each quantizer, on a CPU. Most others want a GPU.
TESTED = {
    "awq": "checkpoints, with gptqmodel's kernels",
    "bitsandbytes_4bit": "checkpoints, and quantizing while loading",
    "bitsandbytes_8bit": "checkpoints, and quantizing while loading",
    "compressed-tensors": "packed int4, int8 and fp8 checkpoints, kept so or decompressed",
    "fp8": "checkpoints in blocks, dequantized",
    "gguf": "transformers reads it by itself (`stock`)",
    "gptq": "checkpoints, with gptqmodel's kernels",
    "mxfp4": "checkpoints, dequantized",
    "torchao": "int8 and fp8 weights: checkpoints, and quantizing while loading",
}


def quantizers(_: Path) -> str:
    """The table of the quantizers that this transformers has."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    assert set(TESTED) <= set(AUTO_QUANTIZER_MAPPING)
    lines = [
        f"With transformers {transformers.__version__}:",
        "",
        "| quantizer | tested |",
        "|---|---|",
        *(f"| `{name}` | {TESTED[name]} |" for name in sorted(TESTED)),
    ]
    others = sorted(set(AUTO_QUANTIZER_MAPPING) - set(TESTED))
    lines.append(f"| {', '.join(f'`{name}`' for name in others)} | no |")
    return "\n".join(lines) + "\n"


def architectures(directory: Path) -> str:
    """The table of the architectures, with the transformers that is installed."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    lines = [
        f"With transformers {transformers.__version__}:",
        "",
        "| architecture | class | keep | convert | conversions |",
        "|---|---|---:|---:|---|",
    ]
    for name, (class_name, _) in tinymodels.ARCHITECTURES.items():
        tinymodels.build(name).save_pretrained(directory / name)
        model = gdsload.from_pretrained(directory / name)
        labels = gdsload.last_report().fates
        kinds = {
            type(operation).__name__
            for conversion in getattr(model, "_weight_conversions", None) or ()
            for operation in getattr(conversion, "operations", ())
        }
        if any(not hasattr(c, "operations") for c in getattr(model, "_weight_conversions", ())):
            kinds.add("renamed")
        lines.append(
            f"| {name} | `{class_name}` | {labels['keep']} | {labels['convert']}"
            f" | {', '.join(sorted(kinds, key=str.lower))} |"
        )
    return "\n".join(lines) + "\n"


TABLES = {"quantizers": quantizers, "architectures": architectures}


@pytest.mark.parametrize("name", TABLES)
def test_table_is_up_to_date(name: str, tmp_path: Path) -> None:
    found = {match[2]: match[3] for match in TABLE.finditer(DOCUMENT.read_text())}
    assert set(found) == set(TABLES)
    written_with = re.search(r"With transformers (\S+):", found[name])
    assert written_with is not None
    if written_with[1] != transformers.__version__:
        pytest.skip(f"the table was written with transformers {written_with[1]}")
    assert found[name] == TABLES[name](tmp_path), "run it as a program"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        texts = {name: table(Path(scratch)) for name, table in TABLES.items()}
    DOCUMENT.write_text(TABLE.sub(lambda m: m[1] + texts[m[2]] + m[4], DOCUMENT.read_text()))
    sys.stdout.write("".join(f"{name}: {t.count(chr(10)) - 4}\n" for name, t in texts.items()))
