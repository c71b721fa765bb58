"""One rank of two: loads a model by transformers alone and through gdsload, and compares.

Run by the tests as `tensor_parallel.py DIRECTORY [DCP]`, with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT set. With DCP the ranks first write a distributed checkpoint there, and load that one.
Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers
from transformers.distributed import DistributedConfig

import gdsload
import tinymodels


def main(directory: str, distributed: str = "") -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.distributed.init_process_group("gloo")
    try:
        words: dict[str, Any] = {"distributed_config": DistributedConfig(tp_size=2)}
    except TypeError:  # transformers before 5.15
        words = {"tp_plan": "auto"}
    stock = transformers.AutoModelForCausalLM.from_pretrained(directory, **words)
    if distributed:
        stock.save_pretrained(distributed, distributed_checkpoint=True)
        directory = distributed
        stock = transformers.AutoModelForCausalLM.from_pretrained(directory, **words)
    with gdsload.accelerated(cache="buffered", window_bytes=8192, ahead_bytes=16384):
        ours = transformers.AutoModelForCausalLM.from_pretrained(directory, **words)
    report = gdsload.last_report()
    wrong, held = [], 0
    one, other = stock.state_dict(), ours.state_dict()
    for name in one:
        parts = [getattr(t, "_local_tensor", t) for t in (one[name], other[name])]
        held += parts[0].nbytes
        if not tinymodels.same_bytes(*parts):
            wrong.append(name)
    with torch.no_grad():
        ids = torch.arange(3, 11).unsqueeze(0)
        logits = [getattr(m(ids).logits, "full_tensor", lambda m=m: m(ids).logits)()
                  for m in (stock, ours)]  # fmt: skip
    print(json.dumps({
        "wrong": wrong, "same_keys": list(one) == list(other),
        "same_logits": torch.equal(*logits), "path": report.path, "reason": report.path_reason,
        "labels": report.labels,
        "tensors": report.tensors, "wanted_bytes": report.wanted_bytes, "held_bytes": held,
    }))  # fmt: skip
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
