"""Stand-ins for the parts of vLLM and SGLang that gdsload touches, by the names of the originals.

Each keeps what the real one does with a list of files: filters, prefixes, the name of the function
that reads them; that of vLLM also when it makes a loader and what it calls of it: at the start
`load_weights`, for new weights and after sleep of level 2 `reload_weights`. `scripts/test-vllm.sh`
tests against the real vLLM.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

_VLLM = {
    "vllm": "",
    "vllm.model_executor": "",
    "vllm.platforms": """
class current_platform:
    is_cuda = staticmethod(lambda: False)
""",
    "vllm.config": """
def get_current_vllm_config_or_none():
    return "configuration"

def get_current_vllm_config():
    assert (config := get_current_vllm_config_or_none()) is not None
    return config
""",
    "vllm.distributed": """
def get_tp_group():
    raise AssertionError("no group was set up")
""",
    "vllm.model_executor.model_loader": """
_LOAD_FORMAT_TO_MODEL_LOADER = {}
registered = []

def register_model_loader(load_format):
    def register(loader):
        registered.append(load_format)
        _LOAD_FORMAT_TO_MODEL_LOADER[load_format] = loader
        return loader
    return register

def get_model_loader(load_config):
    return _LOAD_FORMAT_TO_MODEL_LOADER[load_config.load_format](load_config)
""",
    "vllm.model_executor.model_loader.reload": """
from vllm.model_executor.model_loader import get_model_loader

def reload_weights(load_config, model, model_config, weights_path=None):
    model_loader = get_model_loader(load_config)
    if weights_path is not None:
        model_config.model = weights_path
    model.load_weights(model_loader.get_all_weights(model_config, model))
""",
    "vllm.model_executor.model_loader.ep_weight_filter": """
import re

def should_skip_weight(weight_name, local_expert_ids):
    if local_expert_ids is None:
        return False
    found = re.search(r"\\.experts\\.(\\d+)\\.", weight_name)
    if found is None or not weight_name.endswith((".weight", ".weight_packed")):
        return False
    return int(found.group(1)) not in local_expert_ids
""",
    "vllm.model_executor.model_loader.default_loader": """
import glob
from types import SimpleNamespace

from safetensors import safe_open
from vllm.config import get_current_vllm_config

def safetensors_weights_iterator(
    files,
    use_tqdm_on_load,
    strategy=None,
    local_expert_ids=None,
    *,
    safetensors_prefetch_num_threads=8,
    safetensors_prefetch_block_size=16 << 20,
):
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():
                yield "stock." + name, file.get_tensor(name)

def pt_weights_iterator(files):
    yield from ()

class DefaultModelLoader:
    def __init__(self, load_config):
        unexpected = set(load_config.model_loader_extra_config) - {"enable_weights_track"}
        if unexpected:
            raise ValueError(f"Unexpected extra config keys: {unexpected}")
        self.load_config = load_config
        self.local_expert_ids = None

    def load_weights(self, model, model_config):
        if model_config.quantization == "torchao":
            self.load_config.safetensors_load_strategy = "torchao"
        self._init_ep_weight_filter(model_config)
        model.load_weights(self.get_all_weights(model_config, model))

    def _init_ep_weight_filter(self, model_config):
        get_current_vllm_config()
        self.local_expert_ids = model_config.local_expert_ids

    def get_all_weights(self, model_config, model):
        yield from self._get_weights_iterator(
            SimpleNamespace(model_or_path=model_config.model, prefix="")
        )
        for source in model.secondary_weights:
            yield from self._get_weights_iterator(source)

    def _get_weights_iterator(self, source):
        assert self.load_config.load_format == "auto"
        if files := glob.glob(source.model_or_path + "/*.safetensors"):
            weights_iterator = safetensors_weights_iterator(
                files,
                self.load_config.use_tqdm_on_load,
                self.load_config.safetensors_load_strategy,
                local_expert_ids=self.local_expert_ids,
                safetensors_prefetch_num_threads=8,
                safetensors_prefetch_block_size=16 << 20,
            )
        else:
            weights_iterator = pt_weights_iterator(files)
        return ((source.prefix + name, tensor) for name, tensor in weights_iterator)
""",
}
_SGLANG = {
    "sglang": "",
    "sglang.srt": "",
    "sglang.srt.plugins": "",
    "sglang.srt.plugins.hook_registry": """
import enum
import functools
import pkgutil

class HookType(enum.Enum):
    AROUND = "around"
    REPLACE = "replace"

def wrapped(original, hook, hook_type):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        first = () if hook_type is HookType.REPLACE else (original,)
        return hook(*first, *args, **kwargs)

    return wrapper

class HookRegistry:
    hooks = []

    @classmethod
    def register(cls, target, hook, hook_type):
        cls.hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls):
        for target, hook, hook_type in sorted(
            cls.hooks, key=lambda each: each[2] is not HookType.REPLACE
        ):
            path, name = target.rsplit(".", 1)
            owner = pkgutil.resolve_name(path)
            setattr(owner, name, wrapped(getattr(owner, name), hook, hook_type))
""",
    "sglang.srt.model_loader": "",
    "sglang.srt.model_loader.loader": """
import glob

def safetensors_weights_iterator(
    files, disable_mmap=False, prefetch=False, prefetch_num_threads=4, drop_cache_after_load=False
):
    yield "stock", None

def buffered_multi_thread_safetensors_weights_iterator(
    files,
    max_workers,
    disable_mmap=False,
    prefetch=False,
    prefetch_num_threads=4,
    drop_cache_after_load=False,
):
    yield "stock", None

class DefaultModelLoader:
    def __init__(self, load_config):
        self.load_config = load_config

    def _get_weights_iterator(
        self,
        source,
        *,
        resolved_source=None,
        startup_prefetch_started=False,
        startup_prefetch_active=False,
    ):
        files = resolved_source or glob.glob(source.model_or_path + "/*.safetensors")
        more = dict(disable_mmap=True, prefetch=not startup_prefetch_started,
                    prefetch_num_threads=4, drop_cache_after_load=True)
        if self.load_config.model_loader_extra_config.get("enable_multithread_load", True):
            found = buffered_multi_thread_safetensors_weights_iterator(files, max_workers=2, **more)
        else:
            found = safetensors_weights_iterator(files, **more)
        return ((source.prefix + name, tensor) for name, tensor in found)
""",
}


def install(patch: pytest.MonkeyPatch, engine: str) -> None:
    """Makes the modules of "vllm" or "sglang" importable until the end of the test."""
    for name, text in {"vllm": _VLLM, "sglang": _SGLANG}[engine].items():
        module = ModuleType(name)
        module.__path__ = []
        patch.setitem(sys.modules, name, module)
        exec(text, module.__dict__)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
