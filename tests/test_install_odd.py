"""scripts/install_gds.sh on odd machines: comments in settings, no headers, pods, odd names."""

from __future__ import annotations

import pytest

from test_install_gds import KERNEL, Machine, machine

__all__ = ["machine"]


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ('{"properties": {"io_batchsize": 8, // "use_pci_p2pdma": true\n "x": 1}}', "no"),
        ('{"properties": {/* "use_pci_p2pdma": true, */ "io_batchsize": 8}}', "no"),
        ('{"logging": {"dir": "//nas"}, "properties": {"use_pci_p2pdma": true}} // x // y', "yes"),
        ('{"properties": {"use_pci_p2pdma":\n true,\r\n "io_batchsize": 8}}', "yes"),
        ('{"properties": {"use_pci_p2pdma": true, "io_batchsize": 99999999999999999999}}', "yes"),
    ],
)
def test_comments_are_no_settings(text: str, asked: str, machine: Machine) -> None:
    machine.with_gpu()
    machine.with_p2pdma()
    machine.put("etc/cufile.json", text)
    found = {each["name"]: each for each in machine.check()["findings"]}
    assert found["use_pci_p2pdma"]["verdict"] == asked


def test_headers_that_nobody_offers(machine: Machine) -> None:
    machine.with_gpu()
    machine.with_repository()
    assert "kernel headers" in {each["name"] for each in machine.check()["findings"]}
    machine.put(f"lib/modules/{KERNEL}/build/Makefile", "")
    assert "kernel headers" not in {each["name"] for each in machine.check()["findings"]}


def test_a_pod_is_a_container(machine: Machine) -> None:
    machine.with_gpu()
    found = machine.check(KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert (found["exit_code"], "host" in {each["name"] for each in found["findings"]}) == (2, True)


def test_a_path_of_any_name(machine: Machine) -> None:
    for name in ("a b", 'a"b', "a\\b\\t", "a$b"):
        machine.put(f"models/{name}/x", "")
        assert f"/models/{name}" in {
            each["name"] for each in machine.check(f"/models/{name}")["findings"]
        }
