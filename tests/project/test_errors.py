"""The errors: base classes, messages and pickling."""

from __future__ import annotations

import errno
import pickle
import sys

import pytest

from gdsload import errors
from gdsload.dtypes import DTYPES, torch_dtype

EVERY = [
    (errors.CheckpointError("m", path="/p", tensor="t"), ValueError),
    (errors.FileChanged("m", path="/p"), ValueError),
    (errors.CheckpointUnreadable("m", path="/p", errno=errno.EMFILE), OSError),
    (errors.CheckpointNotFound("m", path="/p", errno=errno.ENOENT), FileNotFoundError),
    (errors.CheckpointAccessError("m", path="/p", errno=errno.EACCES), PermissionError),
    (errors.PlacementError("m", missing_bytes=3), ValueError),
    (errors.BackendUnavailable("m", {"gds": "no driver"}), RuntimeError),
    (errors.ReadError("m", path="/p", offset=1, wanted=2, got=3, errno=errno.EIO), OSError),
    (errors.ShortRead("m", path="/p", offset=1, wanted=2, got=1), OSError),
    (errors.StallError("m", path="/p", hint="wait"), OSError),
    (errors.RemoteError("m", path="s3://b/f", final=True, errno=errno.EACCES), OSError),
    (errors.RankError("m", rank=3), RuntimeError),
    (errors.CuFileError("m", path="/p", code=5030), OSError),
]


@pytest.mark.parametrize("error,builtin", EVERY, ids=lambda value: getattr(value, "__name__", ""))
def test_error_inherits_builtin_and_survives_pickling(
    error: errors.GdsloadError, builtin: type[Exception]
) -> None:
    assert isinstance(error, errors.GdsloadError)
    assert isinstance(error, builtin)
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)
    for fact in ("errno", "filename"):
        assert getattr(twin, fact, None) == getattr(error, fact, None)


def test_read_error_text_has_message_and_hint() -> None:
    error = errors.ReadError("a.bin: it broke", path="a.bin", errno=errno.EIO, hint="try again")
    assert str(error) == "a.bin: it broke (try again)"
    assert error.errno == errno.EIO
    assert error.filename == "a.bin"


@pytest.mark.parametrize(
    "text,expected",
    [("w", "'w'"), ("a\nb", "'a\\nb'"), (7, "7")],
)
def test_shown_quotes_and_escapes(text: object, expected: str) -> None:
    assert errors.shown(text) == expected


def test_shown_shortens_long_text() -> None:
    text = errors.shown("x" * 1_000_000)
    assert len(text) < 300
    assert "1000000 characters" in text


def test_path_with_line_break_is_escaped() -> None:
    error = errors.CheckpointError("a\nb\udcff é: it broke", path="a\nb\udcff")
    assert str(error) == "a\\nb\\udcff é: it broke"
    assert error.path == "a\nb\udcff"


def test_dtype_sizes_equal_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for dtype in DTYPES.values():
        if dtype.torch_name is None or not hasattr(torch, dtype.torch_name):
            with pytest.raises(errors.CheckpointError, match="torch"):
                torch_dtype(dtype.name)
        else:
            elements = 2 if dtype.name == "F4" else 1
            assert torch_dtype(dtype.name).itemsize * 8 == dtype.bits * elements


def test_unknown_dtype_raises() -> None:
    with pytest.raises(errors.CheckpointError, match="'X1' is not a safetensors dtype"):
        torch_dtype("X1")


def test_failed_import_of_safetensors_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if memory for it was short."""
    from safetensors import SafetensorError

    with monkeypatch.context() as without:
        without.setitem(sys.modules, "safetensors", None)
        assert errors.also_safetensors(errors.RankError) is errors.RankError
    assert issubclass(errors.also_safetensors(errors.RankError), SafetensorError)
