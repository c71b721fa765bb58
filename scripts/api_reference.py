"""Writes docs/api.md from the signatures and docstrings of the public names.

    python scripts/api_reference.py           writes the page
    python scripts/api_reference.py --check   fails if the page is out of date

The page has all names in the `__all__` of gdsload and of its public modules, what their methods
return, all errors, and the options of all backends. It lacks methods whose docstring begins with
"Internal:", and constructors of classes that are "made by" a function. Docstrings have Google's
sections.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gdsload
from gdsload import backends, errors, events, telemetry, warmup
from gdsload.readahead.prefetch import PrefetchProgress
from gdsload.safetensors_file import Slice

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
HEAD = """\
# API reference

<!-- Written by scripts/api_reference.py from the docstrings; `make api` writes it again. -->

`import gdsload` is enough for all names here; each is imported when it is first used. Sizes are in
bytes, times in seconds, rates in bytes per second, unless an entry says otherwise.
"""
WIDTH = 88
_SECTIONS = re.compile(r"\n(?=(?:Args|Returns|Yields|Raises|Attributes|Example):\n)")
_MADE_BY = re.compile(r"\A[^\n]*; made by `")  # in the first line of a docstring
_ITEM = re.compile(r"^(\*{0,2}\w+(?:, \w+)*): ", re.MULTILINE)


def page() -> str:
    """The whole page."""
    names = {name: getattr(gdsload, name) for name in gdsload.__all__ if name[0] != "_"}
    classes = {name: each for name, each in names.items() if inspect.isclass(each)}
    error_types = {
        name: each
        for name, each in vars(errors).items()
        if inspect.isclass(each) and issubclass(each, errors.GdsloadError)
    }
    functions = {name: each for name, each in names.items() if inspect.isroutine(each)}
    objects = {name: each for name, each in classes.items() if name not in error_types}
    return "\n".join(
        [
            HEAD,
            "## Functions\n",
            *entries("gdsload", functions),
            "## Classes\n",
            *entries("gdsload", objects),
            *entries("gdsload.readahead.prefetch", {"PrefetchProgress": PrefetchProgress}),
            *entries("gdsload.safetensors_file", {"Slice": Slice}),
            "## Errors\n",
            "All are in `gdsload.errors`, and the most frequent also in `gdsload`.",
            "",
            *prose(inspect.getdoc(errors) or ""),
            *entries("gdsload.errors", error_types),
            *module_entries(warmup),
            *module_entries(events),
            *module_entries(telemetry),
            *module_entries(backends),
            "## Backend options\n",
            "Passed as `options={...}`, with or without `backend=`. Without it, they are options of"
            " the backend that gdsload chooses. `load_into`, `from_pretrained` and the engines"
            " leave out those of `gds` and `gds_mt` for what they read to host memory.\n",
            *option_tables(),
        ]
    )


def module_entries(module: Any) -> Iterator[str]:
    """The docstring and the public names of a module."""
    yield f"## `{module.__name__}`\n"
    yield from prose(inspect.getdoc(module) or "")
    yield from entries(module.__name__, {name: getattr(module, name) for name in module.__all__})


def entries(prefix: str, names: dict[str, Any]) -> Iterator[str]:
    """The signature, the docstring and the public members of each name."""
    for name, value in names.items():
        yield f"### `{prefix}.{name}`\n"
        if not callable(value):
            yield f"`{value!r}`\n"
            continue
        is_class = inspect.isclass(value)
        text = inspect.getdoc(value) or ""
        is_constructed = is_class and not _MADE_BY.search(text)
        if not is_class or (is_constructed and not issubclass(value, BaseException)):
            yield f"```text\n{signature(name, value)}\n```\n"
        yield from docstring(text)
        if is_class:
            if is_constructed and "__init__" in vars(value) and value.__init__.__doc__:
                yield from docstring(inspect.cleandoc(value.__init__.__doc__))
            yield from members(value)


def members(owner: type) -> Iterator[str]:
    """The public methods and properties that a class defines itself."""
    rows = []
    for name, member in vars(owner).items():
        if name[0] == "_" or name in getattr(owner, "_fields", ()):
            continue
        text = " ".join((inspect.getdoc(getattr(owner, name)) or "").split("\n\n")[0].split())
        if not text or text.startswith("Internal:"):
            continue
        if isinstance(member, property):
            rows.append(f"- `{name}` (property): {text}")
        elif inspect.isroutine(member):
            called = signature(name, getattr(owner, name), width=10_000)
            rows.append(f"- `{called}`: {text}")
    if rows:
        yield "\n".join(rows) + "\n"


def signature(name: str, value: Any, width: int = WIDTH) -> str:
    """The call, with one parameter per line if it is wider than `width`."""
    found = inspect.signature(value)
    words = [
        str(each.replace(annotation=each.empty, default=each.empty))
        + ("" if each.annotation is each.empty else f": {annotation(each.annotation)}")
        + ("" if each.default is each.empty else f" = {each.default!r}")
        for each in found.parameters.values()
        if each.name != "self"
    ]
    kinds = [each.kind for each in found.parameters.values() if each.name != "self"]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        words.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    result = found.return_annotation
    end = "" if result in (found.empty, None, "None") else f" -> {annotation(result)}"
    line = f"{name}({', '.join(words)}){end}"
    if len(line) <= width:
        return line
    return f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){end}"


def annotation(value: Any) -> str:
    """An annotation as text; those of NamedTuples are ForwardRefs."""
    value = getattr(value, "__forward_arg__", value)
    return value if isinstance(value, str) else inspect.formatannotation(value)


def docstring(text: str) -> Iterator[str]:
    """A docstring as Markdown: prose, and a list for each section."""
    first, *rest = _SECTIONS.split(text)
    yield from prose(first)
    for section in rest:
        title, _, body = section.partition(":\n")
        yield f"**{title}**\n"
        body = inspect.cleandoc(body)
        if title == "Example":
            yield f"```pycon\n{body}\n```\n"
        else:
            body = re.sub(r"\n +", " ", body)
            yield _ITEM.sub(r"- `\1`: ", body) + "\n"


def prose(text: str) -> Iterator[str]:
    """Paragraphs; indented ones are fenced."""
    for paragraph in text.strip("\n").split("\n\n"):
        drawn = paragraph.startswith("    ")
        yield f"```text\n{inspect.cleandoc(paragraph)}\n```\n" if drawn else f"{paragraph}\n"


def option_tables() -> Iterator[str]:
    """A table of options for each backend that has any."""
    for name in (*backends.names(), *backends.registry.REMOTE):
        options: Iterable[backends.Option] = backends.find(name).options()
        rows = [f"| `{each.name}` | `{each.default!r}` | {each.meaning} |" for each in options]
        if rows:
            yield "\n".join(
                [f"### `{name}`\n", "| option | default | meaning |", "|---|---|---|", *rows, ""]
            )


def main() -> None:
    """Writes or checks the page."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.exit("docs/api.md is out of date: run `make api`")


if __name__ == "__main__":
    main()
