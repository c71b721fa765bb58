"""One rank of two: loads models by transformers alone and through gdsload, and compares.

Run by the tests (`ranks.py`). With --distributed the ranks write the first of them as a distributed
checkpoint there, too, and load that one last. Prints one line of JSON: what was found of each.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any
from unittest import mock

import torch
import transformers
from transformers.distributed import DistributedConfig

import gdsload
import tinymodels
from windows import small_windows


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("models", nargs="+")
    words.add_argument("--distributed", default="")
    options = words.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['GROUP']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    found = [compared(model) for model in options.models]
    if options.distributed:
        found.append(compared(options.models[0], options.distributed))
    print(json.dumps(found))
    torch.distributed.destroy_process_group()


def compared(directory: str, distributed: str = "") -> dict[str, Any]:
    try:
        words: dict[str, Any] = {"distributed_config": DistributedConfig(tp_size=2)}
    except TypeError:  # transformers before 5.15
        words = {"tp_plan": "auto"}
    try:
        stock = transformers.AutoModelForCausalLM.from_pretrained(directory, **words)
        alone = ""
    except Exception as error:
        alone = str(error) or type(error).__name__
    everywhere = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, alone)
    if any(everywhere):
        return {"alone": max(everywhere)}
    if distributed:
        stock.save_pretrained(distributed, distributed_checkpoint=True)
        directory = distributed
        stock = transformers.AutoModelForCausalLM.from_pretrained(directory, **words)
    with small_windows(), gdsload.accelerated(cache="buffered"):
        ours = transformers.AutoModelForCausalLM.from_pretrained(directory, **words)
    report = gdsload.last_report()
    together = {}
    if not distributed:
        # As of rows so long that a rank which reads alone skips what it does not want of them.
        with mock.patch("gdsload.planning.tensor_slices.GAP_BYTES", 0):
            together = {"parts": shared(directory, stock, **words)}
        together["whole"] = shared(directory)
    wrong, held = [], 0
    one, other = stock.state_dict(), ours.state_dict()
    for name in one:
        parts = [getattr(t, "_local_tensor", t) for t in (one[name], other[name])]
        held += parts[0].nbytes
        if not tinymodels.same_bytes(*parts):
            wrong.append(name)
    with torch.no_grad():
        ids = torch.arange(3, 11).unsqueeze(0)
        logits = [
            getattr(m(ids).logits, "full_tensor", lambda m=m: m(ids).logits)()
            for m in (stock, ours)
        ]
    return {
        "wrong": wrong,
        "same_keys": list(one) == list(other),
        "same_logits": torch.equal(*logits),
        "path": report.integration,
        "reason": report.integration_reason,
        "labels": report.fates,
        "tensors": report.tensors,
        "wanted_bytes": report.wanted_bytes,
        "held_bytes": held,
        "shared": together,
    }


def shared(directory: str, stock: Any = None, **words: Any) -> dict[str, Any]:
    """A model whose bytes the ranks read together."""
    if stock is None:
        stock = transformers.AutoModelForCausalLM.from_pretrained(directory)
    ours = gdsload.from_pretrained(
        directory,
        cls=transformers.AutoModelForCausalLM,
        group=torch.distributed.group.WORLD,
        **words,
    )
    report = gdsload.last_report()
    one, other = stock.state_dict(), ours.state_dict()
    return {
        "wrong": [
            name
            for name in one
            if not tinymodels.same_bytes(
                *(getattr(t, "_local_tensor", t) for t in (one[name], other[name]))
            )
        ],
        "same_keys": list(one) == list(other),
        "path": report.integration,
        "ranks": report.ranks,
        "read_bytes": report.read_bytes + report.paths.get("mapped", 0),
        "received_bytes": report.received_bytes,
        "wanted_bytes": report.wanted_bytes,
    }
