"""Runs the code blocks of the documents, in order, in a directory with a checkpoint ``model``.

A block below ``<!-- no-test: reason -->`` is skipped with that reason, one below ``<!-- needs:
module -->`` if that module is not installed. A bash block below ``<!-- run -->`` runs too: each of
its ``gdsload ...`` lines, in this process.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from command import run
from gdsload.cli.warming import COLD

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!--\s*(?P<mark>[^>]*?)\s*-->\s*?\n\s*)?^```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    document: Path
    line: int
    language: str
    mark: str
    code: str

    @property
    def skipped(self) -> str | None:
        kind, _, reason = self.mark.partition(":")
        if kind.strip() == "needs":
            missing = importlib.util.find_spec(reason.strip()) is None
            return f"{reason.strip()} is not installed" if missing else None
        return reason.strip() if kind.strip() == "no-test" else None

    def run(self, namespace: dict[str, object]) -> None:
        if self.language == "python":
            # Leading empty lines, so that a traceback names the line of the document.
            code = compile("\n" * self.line + self.code, str(self.document), "exec")
            exec(code, namespace)
        else:
            for line in self.code.replace("\\\n", " ").splitlines():
                run_command(line.removeprefix("$ "))


def run_command(line: str) -> None:
    words = shlex.split(line, comments=True)
    if words[:1] == ["gdsload"]:
        ended = run(*words[1:])
        if ended.exit_code == COLD:  # the kernel has dropped pages meanwhile, as it may
            ended = run(*words[1:])
        assert ended.exit_code == 0, f"{line}\n{ended.output}"


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text()
    for found in BLOCK.finditer(text):
        mark = found["mark"] or ""
        language = {"py": "python", "sh": "bash", "console": "bash"}.get(
            found["language"], found["language"]
        )
        if language == "python" or (language == "bash" and mark == "run"):
            line = text.count("\n", 0, found.start("code"))
            yield Block(document, line, language, mark, found["code"])


BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]


class Reader:
    """Runs one document from its top: a block sees the names that earlier blocks have defined."""

    def __init__(self, document: Path, directory: Path) -> None:
        self.waiting = [block for block in BLOCKS if block.document == document]
        self.directory = directory
        self.namespace: dict[str, object] = {"__name__": document.stem}

    def read_to(self, target: Block) -> None:
        while self.waiting and self.waiting[0].line <= target.line:
            block = self.waiting.pop(0)
            if block.skipped is None:
                block.run(self.namespace)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> dict[Path, Reader]:
    made = {}
    for document in DOCUMENTS:
        directory = tmp_path_factory.mktemp(document.stem)
        shutil.copytree(tiny_checkpoint, directory / "model")
        (directory / "cache").mkdir()
        made[document] = Reader(document, directory)
    return made


@pytest.mark.parametrize(
    "block", BLOCKS, ids=[f"{block.document.name}:{block.line}" for block in BLOCKS]
)
def test_document_block_runs(
    block: Block, readers: dict[Path, Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    if block.skipped is not None:
        pytest.skip(block.skipped)
    reader = readers[block.document]
    monkeypatch.chdir(reader.directory)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    reader.read_to(block)


def test_readme_has_running_blocks() -> None:
    running = [b for b in BLOCKS if b.document.name == "README.md" and b.skipped is None]
    assert {block.language for block in running} >= {"python"}


def test_skipped_block_gives_reason() -> None:
    assert [f"{b.document.name}:{b.line}" for b in BLOCKS if b.skipped == ""] == []


def test_document_links_exist() -> None:
    missing = []
    for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for link in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
            if "://" not in link and not os.path.exists(document.parent / link):
                missing.append(f"{document.name}: {link}")
    assert missing == []


def anchors(document: Path) -> set[str]:
    """Those of its headings, outside of blocks of code."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def test_linked_headings_exist() -> None:
    missing = []
    for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for link, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", document.read_text()):
            target = document.parent / link if link else document
            if "://" not in link and target.suffix == ".md" and anchor not in anchors(target):
                missing.append(f"{document.name}: {link}#{anchor}")
    assert missing == []


def test_block_is_found_with_mark_and_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- a remark --> text\n\n```python\na = 1\n```\n\n"
        "<!-- no-test: needs a GPU -->\n```python\nb = 2\n```\n\n"
        "<!-- run -->\n\n```bash\ngdsload --help\n```\n\n```bash\nmake demo\n```\n"
    )
    found = [(b.line, b.language, b.skipped, b.code) for b in blocks(page)]
    assert found == [
        (3, "python", None, "a = 1\n"),
        (8, "python", "needs a GPU", "b = 2\n"),
        (14, "bash", None, "gdsload --help\n"),
    ]
