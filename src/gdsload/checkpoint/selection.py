"""Which tensors are wanted: by name, glob, regular expression, layer, expert, or a function.

A choice is made from the names in the headers, before anything is read. Not responsible for parts
of a tensor (`planning.tensor_slices`).
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from gdsload.errors import CheckpointError, shown

if TYPE_CHECKING:
    from gdsload.checkpoint.header import TensorInfo

# What a name must be: a name or a glob, a regular expression that is searched in it, or a function
# that says whether it is wanted.
Choice: TypeAlias = "str | re.Pattern[str] | Callable[[str], bool]"
# A choice, or several: a tensor is wanted if one of them fits. None: all tensors.
Names: TypeAlias = "Choice | Iterable[Choice] | None"

# Compiled at their first use: it takes up to 1 ms each, which the first load would pay for.
_GLOB = r"[*?[]"
# Comparing a name with 1000 others takes 20 ms.
_MOST_COMPARED = 2000
_LONGEST_COMPARED = 200
# More digits are no number of a layer, and Python refuses to convert thousands of them.
_LAYER = r"(?:^|\.)(\d{1,18})(?=\.|$)"
_EXPERT = r"(?:^|\.)experts\.(\d{1,18})(?=\.|$)"


class Selection:
    """Tensors by a property of their names; made by `layers` and `experts`.

    Selections are combined with `&`, `|` and `~`, also with globs, regular expressions and
    functions. A selection is itself a function of a name.
    """

    def __init__(self, fits: Callable[[str], bool], text: str) -> None:
        self._fits, self._text = fits, text

    def __call__(self, name: str) -> bool:
        return self._fits(name)

    def __and__(self, other: Choice) -> Selection:
        one, two = self._fits, predicate(other)
        return Selection(lambda name: one(name) and two(name), f"({self!r} & {other!r})")

    def __or__(self, other: Choice) -> Selection:
        one, two = self._fits, predicate(other)
        return Selection(lambda name: one(name) or two(name), f"({self!r} | {other!r})")

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Selection:
        fits = self._fits
        return Selection(lambda name: not fits(name), f"~{self!r}")

    def __repr__(self) -> str:
        return self._text


def layers(first: int, end: int | None = None) -> Selection:
    """Selects the tensors of some layers, for the argument `names` of a load.

    The number of a layer is the first number between the dots of a name. Embeddings, final norms
    and heads have none, and are selected by their names.

    Args:
        first: The first layer.
        end: The layer after the last one. None: all layers from `first`.

    Returns:
        A selection, which `&`, `|` and `~` combine with others.

    Raises:
        ValueError: `first` is negative, or `end` is not after it.

    Example:
        >>> first_half = [gdsload.layers(0, 16), "model.embed_tokens.*"]
        >>> tensors = gdsload.load_file("model", names=first_half)
    """
    return _numbered("layers", _LAYER, first, end)


def experts(first: int = 0, end: int | None = None) -> Selection:
    """Selects the tensors of some experts, for the argument `names` of a load.

    The number of an expert follows "experts." in a name. Tensors that hold all experts of a layer
    have none: `slices` reads a part of them.

    Args:
        first: The first expert.
        end: The expert after the last one. None: all experts from `first`.

    Returns:
        A selection, which `&`, `|` and `~` combine with others.

    Raises:
        ValueError: `first` is negative, or `end` is not after it.

    Example:
        >>> mine = ~gdsload.experts() | gdsload.experts(0, 8)  # all but the other experts
        >>> tensors = gdsload.load_file("model", names=mine)
    """
    return _numbered("experts", _EXPERT, first, end)


def _numbered(kind: str, pattern: str, first: int, end: int | None) -> Selection:
    if first < 0 or (end is not None and end <= first):
        raise ValueError(f"{kind}({first}, {end}): there are none from {first} to {end}")

    search = re.compile(pattern).search

    def fits(name: str) -> bool:
        found = search(name)
        return found is not None and first <= int(found[1]) and (end is None or int(found[1]) < end)

    return Selection(fits, f"{kind}({first}, {end})")


def predicate(choice: Choice) -> Callable[[str], bool]:
    """A function that says whether a name fits. Raises TypeError for anything but a `Choice`."""
    _require_choice(choice)
    if isinstance(choice, str):
        glob = re.compile(fnmatch.translate(choice))
        return lambda name: name == choice or glob.match(name) is not None
    if isinstance(choice, re.Pattern):
        search = choice.search
        return lambda name: search(name) is not None
    return choice


def _require_choice(choice: object) -> None:
    of_text = isinstance(choice, re.Pattern) and isinstance(choice.pattern, str)
    if not (of_text or isinstance(choice, str) or callable(choice)):
        raise TypeError(
            f"names takes names, globs, regular expressions and functions, not {choice!r}"
        )


def no_such_tensor(name: str, tensors: Mapping[str, TensorInfo], source: str) -> CheckpointError:
    """The error for a name that the checkpoint does not have. It names a similar one."""
    similar = []
    if len(tensors) <= _MOST_COMPARED and len(name) <= _LONGEST_COMPARED:
        similar = difflib.get_close_matches(name, tensors, n=1, cutoff=0.8)
    hint = f"; did you mean {shown(similar[0])}?" if similar else ""
    text = f"{source}: there is no tensor {shown(name)} in it{hint}"
    return CheckpointError(text, path=source, tensor=name)


def is_single(names: object) -> bool:
    """Whether `names` is one choice, rather than several or None."""
    return isinstance(names, (str, re.Pattern)) or callable(names)


def repeatable(names: Names) -> Names:
    """The same choices, also the second time: an iterator gives them once. Raises TypeError."""
    if names is None:
        return None
    if is_single(names):
        _require_choice(names)
        return names
    choices: tuple[Choice, ...] = tuple(names)  # type: ignore[arg-type]
    for choice in choices:
        _require_choice(choice)
    return choices


def chosen(tensors: Mapping[str, TensorInfo], names: Names, source: str) -> list[TensorInfo]:
    """The tensors that fit, each once: in the order of the choices, and for each in file order.

    Raises:
        CheckpointError: Nothing fits a choice. The message names `source`.
        TypeError: A choice is of another type.
    """
    if names is None:
        return list(tensors.values())
    choices: Iterable[Choice] = [names] if is_single(names) else names  # type: ignore[list-item, assignment]
    found: dict[str, TensorInfo] = {}
    for choice in choices:
        info = tensors.get(choice) if isinstance(choice, str) else None
        if info is not None:
            found[info.name] = info
            continue
        if isinstance(choice, str) and not re.search(_GLOB, choice):
            raise no_such_tensor(choice, tensors, source)
        fits = predicate(choice)
        hits = {name: each for name, each in tensors.items() if fits(name)}
        if not hits:
            text = choice.pattern if isinstance(choice, re.Pattern) else choice
            raise CheckpointError(
                f"{source}: no tensor has the name or matches the pattern {shown(text)}",
                path=source,
                tensor=choice if isinstance(choice, str) else None,
            )
        found.update(hits)
    return list(found.values())
