"""Fixtures of the tests of integrations."""

import sys

import pytest


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Warnings and progress bars of transformers are off, in tests that import it."""
    if transformers := sys.modules.get("transformers"):
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
