"""The weights of a serving engine: its safetensors files, read by `gdsload.stream`.

    the engine's loader ──► files, names ──► WeightsReader ──► (name, tensor) ──► model.load_weights

What `vllm` and `sglang` share: the options that a user may set, and a bound for the device memory
that the tensors take. Which files and tensors are wanted is decided by the engine.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from types import FunctionType
from typing import TYPE_CHECKING, Any

from gdsload.api import STREAM_WINDOW_BYTES, stream
from gdsload.backends.registry import find
from gdsload.loading.settings import ReadSettings
from gdsload.report import last_report
from gdsload.system import device_name

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

# Device memory of tensors that the model keeps, instead of copying them into its parameters.
HELD_BYTES = 1 << 30
_CHECK_BYTES = 64 << 20  # handed out between two looks at what the model keeps


def _size(value: Any) -> int:
    if type(value) is not int or value <= 0:
        raise ValueError("it must be a number of bytes above 0")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or value <= 0:
        raise ValueError("it must be a number of seconds above 0")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("it must be a string")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it must be an object with the options of the backend")
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "device": _text,
    "backend": _text,
    "cache": _text,
    "page_cache": _text,
    "options": _mapping,
    "window_bytes": _size,
    "stall_seconds": _seconds,
    "verify": _text,
    "held_bytes": _size,
}


class WeightsReader:
    """Reads the weights of an engine. Options are checked here, before a model is built.

    Args:
        options: `device`, `backend`, `cache`, `page_cache`, `options`, `window_bytes`,
            `stall_seconds` and `verify` (no path) as for `gdsload.stream`; `held_bytes` bounds the
            device memory of tensors that the model keeps.
        also: Names of other options, which the engine takes, for the message.

    Raises:
        ValueError: An option is unknown or has no such value.
        TypeError: The backend has no such option, or none of this type.
        PlacementError: The device does not exist.
        BackendUnavailable: There is no such backend, or it cannot work with its options.
    """

    def __init__(self, options: Mapping[str, Any], also: Sequence[str] = ()) -> None:
        if unknown := sorted(map(str, options.keys() - _CHECKS.keys())):
            known = ", ".join([*_CHECKS, *also])
            raise ValueError(f"unknown options: {', '.join(unknown)}; gdsload knows {known}")
        values = dict(options)
        for name, value in options.items():
            try:
                values[name] = _CHECKS[name](value)
            except ValueError as error:
                raise ValueError(f"option {name}={value!r}: {error}") from None
        self.device: str | None = values.pop("device", None)  # None: the engine's
        self._held_bytes: int = values.pop("held_bytes", HELD_BYTES)
        self._window_bytes: int = values.pop("window_bytes", STREAM_WINDOW_BYTES)
        self._settings = ReadSettings(**values)
        if self.device is not None and device_name.require_target(self.device) == "cpu":
            self.device = "cpu"  # it has other names
        _require_backend(self._settings.backend, self._settings.options)

    def read(
        self,
        files: Sequence[str],
        device: str,
        log: logging.Logger,
        *,
        wanted: Callable[[str], bool] | None = None,
        group: ProcessGroup | None = None,
        progress: bool = False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of the files, each with memory of its own or that it keeps alive.

        A model may collect them in a list. When those that it keeps take more than `held_bytes` of
        device memory, the rest is yielded in host memory, where a backend that cannot read there
        is "auto"; not with a group, whose ranks would have to do so at the same tensor.

        Args:
            files: The shards.
            device: The device of the engine, used if the options name none.
            log: Where the report of the load is written to.
            wanted: Says of a name whether the tensor is read. None: all are.
            group: The ranks that share the reads, as for `gdsload.stream`. None: this one reads all
                that it wants.
            progress: Whether to show a progress bar on stderr.

        Raises:
            GdsloadError: As for `gdsload.stream`.
        """
        device = self.device or device
        done: set[str] = set()

        def rest(name: str) -> bool:
            return name not in done and (wanted is None or wanted(name))

        def pairs(device: str, settings: ReadSettings) -> Iterator[tuple[str, torch.Tensor]]:
            return stream(
                sorted(files, key=_natural_order),
                device,
                names=rest if done or wanted is not None else None,
                window_bytes=self._window_bytes,
                group=group,
                strict=False,  # of two tensors of one name the last counts, as for the engines
                progress=progress,
                **settings.keywords(),
            )

        held = _Held()
        crowded = False
        settings = self._settings
        if device == "cpu" and settings.backend == "auto":
            settings = settings.for_host()
        with closing(pairs(device, settings)) as on_device:  # type: ignore[type-var]
            for name, tensor in on_device:
                if crowded := held.exceeds(self._held_bytes):
                    del tensor
                    break
                if device != "cpu" and group is None:
                    done.add(name)
                    held.add(tensor)
                yield name, tensor
                del tensor
        log.info("gdsload: %s", last_report().summary())
        if crowded:
            log.warning(
                "gdsload: the model keeps more than %d bytes of weights on %s in addition to its"
                " parameters (option held_bytes): the rest is handed over in host memory",
                self._held_bytes,
                device,
            )
            yield from pairs("cpu", self._settings.for_host())
            log.info("gdsload: %s", last_report().summary())


def _require_backend(name: str, options: Mapping[str, Any]) -> None:
    """Makes a backend, which checks its options, and opens nothing. Raises as `WeightsReader`."""
    if name != "auto":
        with find(name)(**options):
            return
    if options:
        from gdsload.backends.auto.backend import AutoBackend  # imports CUDA

        with AutoBackend("cuda:0", 0, **options):
            return


def _natural_order(path: Any) -> list[str | int]:
    """A key that sorts model-2 before model-10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]


class _Held:
    """The memory of the tensors that were handed out and are still in use, or views of them."""

    def __init__(self) -> None:
        self._storages: deque[tuple[Any, int]] = deque()
        self._unseen = 0

    def add(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._storages.append((reference, tensor.nbytes))
        self._unseen += tensor.nbytes

    def exceeds(self, nbytes: int) -> bool:
        """Whether more than `nbytes` bytes are in use. Looks only now and then."""
        if self._unseen < min(_CHECK_BYTES, nbytes):
            return False
        self._unseen = 0
        self._storages = deque(each for each in self._storages if not each[0].expired())
        return sum(size for _, size in self._storages) > nbytes


def with_reader(function: Callable[..., Any], names: Sequence[str], reader: Any) -> Any:
    """A copy of an engine's function that calls `reader` wherever it calls one of `names`.

    The engine's module is left as it is, so that its other load formats are not touched.

    Raises:
        RuntimeError: The function calls none of `names`: its package is not as expected.
    """
    if not (used := [name for name in names if name in function.__code__.co_names]):
        raise RuntimeError(
            f"{function.__module__}.{function.__qualname__} does not read weights by"
            f" {' or '.join(names)}: gdsload does not fit this version of"
            f" {function.__module__.partition('.')[0]}"
        )
    scope = {**function.__globals__, **dict.fromkeys(used, reader)}
    copy = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def is_first_rank() -> bool:
    """Whether this process is the one of a group of ranks that shows its progress."""
    from torch import distributed

    return not distributed.is_initialized() or distributed.get_rank() == 0
