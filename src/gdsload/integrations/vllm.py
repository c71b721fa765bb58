"""The load format "gdsload" of vLLM: its default loader, with safetensors files read by gdsload.

vLLM calls `register`, an entry point, in each of its processes. Everything but the reading stays
vLLM's: which files and tensors are wanted, prefixes, expert parallelism, quantization, checks,
reloading. Nothing else in gdsload imports this module or vLLM.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from gdsload.distribution.shared_load import NOT_COMPARED
from gdsload.integrations.engine_weights import WeightsReader, is_first_rank, with_reader

if TYPE_CHECKING:
    import torch

FORMAT = "gdsload"
_ITERATOR = "safetensors_weights_iterator"  # vLLM's function that reads the files
_OF_VLLM = ("enable_weights_track",)  # options of the default loader that have a meaning here
log = logging.getLogger("vllm.gdsload")  # vLLM shows what is logged below its own name


def register() -> None:
    """Adds the load format to vLLM. May be called again."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as known

    if known.get(FORMAT) is not GdsloadModelLoader:
        register_model_loader(FORMAT)(GdsloadModelLoader)


class GdsloadModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's default loader with safetensors files read by gdsload.

    Its options, by `--model-loader-extra-config`, are those of `WeightsReader`,
    `enable_weights_track` of the default loader, and `distributed`: whether the ranks of tensor
    parallelism share the reads.
    """

    def __init__(self, load_config: Any) -> None:
        """Raises ValueError if an option is unknown, has no such value or contradicts another."""
        extra = load_config.model_loader_extra_config
        if not isinstance(extra, dict):
            raise ValueError(f"model_loader_extra_config must be a dict, not {extra!r}")
        strategy = getattr(load_config, "safetensors_load_strategy", None)
        if strategy not in (None, "lazy", "torchao"):
            raise ValueError(
                f"--safetensors-load-strategy {strategy} is for vLLM's own reading of safetensors:"
                " with --load-format gdsload leave it out"
            )
        own = {name: value for name, value in extra.items() if name not in _OF_VLLM}
        self._distributed = own.pop("distributed", False)
        if not isinstance(self._distributed, bool):
            raise ValueError(f"option distributed={self._distributed!r}: it must be true or false")
        if self._distributed and own.get("verify", "size") != "size":
            raise ValueError(f"option distributed=True: {NOT_COMPARED}")
        self._reader = WeightsReader(own, also=("distributed", *_OF_VLLM))
        self._given_config = load_config
        config = copy.copy(load_config)
        config.load_format = "auto"  # what files there are is found as by default
        config.model_loader_extra_config = {
            name: value for name, value in extra.items() if name in _OF_VLLM
        }
        super().__init__(config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        super().load_weights(model, model_config)
        # vLLM notes in its configuration that a checkpoint is one of torchao, for `reload_weights`.
        if getattr(self.load_config, "safetensors_load_strategy", None) == "torchao":
            self._given_config.safetensors_load_strategy = "torchao"

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        # For `reload_weights` vLLM makes a new loader and calls nothing else: it would not know the
        # experts of its rank, and read those of all ranks. Versions without this attribute have no
        # such filter; outside of vLLM's workers there may be no configuration to ask.
        if getattr(self, "local_expert_ids", ()) is None:
            from vllm.config import get_current_vllm_config_or_none

            if get_current_vllm_config_or_none() is not None:
                self._init_ep_weight_filter(model_config)
        yield from super().get_all_weights(model_config, model)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        called = False

        def read(
            files: Sequence[str],
            use_tqdm_on_load: bool,
            strategy: str | None = None,
            *rest: Any,
            local_expert_ids: set[int] | None = None,
            **keywords: Any,
        ) -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal called
            called = True
            if strategy == "torchao":
                log.warning("gdsload: vLLM reads and rebuilds the tensors of torchao itself")
                stock_read = stock.__globals__[_ITERATOR]
                keywords["local_expert_ids"] = local_expert_ids
                found = stock_read(files, use_tqdm_on_load, strategy, *rest, **keywords)
                return found  # type: ignore[no-any-return]
            return self._reader.read(
                files,
                self._device(),
                log,
                wanted=_wanted(local_expert_ids),
                group=self._group(),
                progress=use_tqdm_on_load and is_first_rank(),
            )

        stock = inspect.unwrap(super()._get_weights_iterator.__func__)
        weights = with_reader(stock, [_ITERATOR], read)(self, source)
        if not called:
            log.warning(
                "gdsload: %s has no safetensors files: vLLM reads it itself", source.model_or_path
            )
        return weights  # type: ignore[no-any-return]

    def _group(self) -> Any:
        """The ranks that load the same tensors at the same time, if they share the reads."""
        if not self._distributed:
            return None
        from vllm.distributed import get_tp_group

        ranks = get_tp_group()
        return ranks.device_group if ranks.world_size > 1 else None

    def _device(self) -> str:
        """The device of this rank; "cpu" where it has no NVIDIA GPU, or was told to load there."""
        asked = getattr(self.load_config, "device", None)
        if not current_platform.is_cuda() or (asked or "cuda").partition(":")[0] != "cuda":
            return "cpu"
        import torch

        return f"cuda:{torch.cuda.current_device()}"


def _wanted(local_expert_ids: set[int] | None) -> Any:
    """Says of a name whether this rank of an expert-parallel group needs it. None: it needs all."""
    if local_expert_ids is None:
        return None
    from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

    return lambda name: not should_skip_weight(name, local_expert_ids)
