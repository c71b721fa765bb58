"""What is said when NIXL cannot work here, with a double of its package."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gdsload.errors import BackendUnavailable
from gdsload.remote import nixl_library


class _FailingAgent:
    def __init__(self, *_: object) -> None: ...

    def create_backend(self, *_: object) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")


@pytest.mark.parametrize(
    ("plugin", "exists", "hinted"),
    [("UCX", False, True), ("UCX", True, False), ("LIBFABRIC", False, False)],
)
def test_backend_that_fails_without_shared_memory_has_a_hint(
    plugin: str, exists: bool, hinted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api: Any = SimpleNamespace(nixl_agent=_FailingAgent, nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(nixl_library, "nixl_api", lambda: api)
    monkeypatch.setattr(
        nixl_library, "SHARED_MEMORY", str(tmp_path if exists else tmp_path / "shm")
    )
    with pytest.raises(BackendUnavailable, match=r"backend .*: NIXL_ERR_BACKEND") as caught:
        nixl_library.new_agent("name", plugin, {}, progress=False)
    assert ("needs a writable" in str(caught.value)) == hinted
