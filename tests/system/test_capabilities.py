"""Capabilities that count for the files and the memory of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdsload.system.capabilities import CAP_FOWNER, CAP_IPC_LOCK, has_capability

ALL, ONLY_FOWNER = "000001ffffffffff", "0000000000000008"
ALL_USERS = "         0          0 4294967295\n"


def root(path: Path, capabilities: str, users: str) -> str:
    """A root directory whose `/proc/self` describes such a process."""
    folder = path / "proc" / "self"
    folder.mkdir(parents=True)
    if capabilities:
        status = f"CapPrm:\t{ALL}\nCapEff:\t{capabilities}\nCapBnd:\t{ALL}\n"
        (folder / "status").write_text(status)
    if users:
        (folder / "uid_map").write_text(users)
    return str(path)


@pytest.mark.parametrize(
    ("capabilities", "users", "has"),
    [
        (ALL, ALL_USERS, True),
        (ONLY_FOWNER, ALL_USERS, True),
        (ONLY_FOWNER, "", True),  # a kernel without user namespaces
        ("000001fffffffff7", ALL_USERS, False),
        ("0000000000000000", ALL_USERS, False),
        (ALL, "0 100000 65536\n", False),
        (ALL, "0 1000 1\n1 100000 65536\n", False),
        (ALL, "0 1 4294967295\n", False),
        ("", ALL_USERS, False),
        ("", "", False),
    ],
)
def test_capability_counts_if_it_is_effective_and_the_users_are_those_of_the_machine(
    tmp_path: Path, capabilities: str, users: str, has: bool
) -> None:
    assert has_capability(CAP_FOWNER, root(tmp_path, capabilities, users)) == has


def test_capabilities_are_told_apart(tmp_path: Path) -> None:
    made = root(tmp_path, ONLY_FOWNER, ALL_USERS)
    assert has_capability(CAP_FOWNER, made) and not has_capability(CAP_IPC_LOCK, made)
