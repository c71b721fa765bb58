"""Tiny models of many architectures, built offline from their configs, and their comparison.

Every parameter is perturbed before it is saved, so that a tensor that was silently initialised
anew, or went to another place, shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

# Small sizes under the names that most configs use; a config takes those it knows.
TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE: dict[str, Any] = {
    **TEXT, "moe_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "shared_expert_intermediate_size": 24, "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
}  # fmt: skip
MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
VIT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
SPEECH: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "do_stable_layer_norm": False,
}  # fmt: skip


def _config(kind: str, **sizes: Any) -> Callable[[], Any]:
    return lambda: transformers.AutoConfig.for_model(kind, **sizes)


def _qwen2_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    name = "rope_parameters" if transformers.__version__[0] > "4" else "rope_scaling"
    text = {**TEXT, name: rope}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4,
              "mlp_ratio": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip
    return transformers.AutoConfig.for_model("qwen2_vl", text_config=text, vision_config=vision)


ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def _qwen3_vl_moe() -> Any:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4,
              "patch_size": 4, "out_hidden_size": 32, "num_position_embeddings": 16,
              "deepstack_visual_indexes": [0]}  # fmt: skip
    text = {**MOE, "rope_parameters": ROPE}
    return transformers.AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision)


def _ernie4_5_vl_moe() -> Any:
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "patch_size": 4,
    }
    text = {
        **MOE,
        "moe_intermediate_size": [24, 24],
        "moe_num_experts": 4,
        "moe_k": 2,
        "rope_parameters": ROPE,
    }
    return transformers.AutoConfig.for_model(
        "ernie4_5_vl_moe", text_config=text, vision_config=vision
    )


def _kimi_k25() -> Any:
    vision = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "patch_size": 4,
    }
    text = {**MOE, **MLA, "model_type": "deepseek_v3"}
    return transformers.AutoConfig.for_model("kimi_k25", text_config=text, vision_config=vision)


def _llava() -> Any:
    return transformers.AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **VIT},
        image_token_index=95,
    )


def _clip() -> Any:
    return transformers.AutoConfig.for_model(
        "clip", text_config={**TEXT}, vision_config={**VIT}, projection_dim=16
    )


def _siglip() -> Any:
    return transformers.AutoConfig.for_model("siglip", text_config=TEXT, vision_config=VIT)


def _gemma3() -> Any:
    return transformers.AutoConfig.for_model(
        "gemma3",
        text_config=GEMMA3,
        vision_config={"model_type": "siglip_vision_model", **VIT},
        mm_tokens_per_image=4,
        image_token_index=95,
        boi_token_index=94,
        eoi_token_index=93,
    )


def _encoder_decoder() -> Any:
    bert = {"model_type": "bert", **TEXT}
    decoder = {**bert, "is_decoder": True, "add_cross_attention": True}
    return transformers.AutoConfig.for_model(
        "encoder-decoder", encoder=bert, decoder=decoder, decoder_start_token_id=1, pad_token_id=0
    )


_NO_HEAD_DIM = {name: size for name, size in TEXT.items() if name != "head_dim"}
GEMMA3 = {**TEXT, "sliding_window": 16, "query_pre_attn_scalar": 8}
# name -> (class, config). The comment says what it is here for.
ARCHITECTURES: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("LlamaForCausalLM", _config("llama", **TEXT)),
    "llama_tied": ("LlamaForCausalLM", _config("llama", **TEXT, tie_word_embeddings=True)),
    "mistral": ("MistralForCausalLM", _config("mistral", **TEXT)),
    "ministral": ("MinistralForCausalLM", _config("ministral", **TEXT)),
    "phi": ("PhiForCausalLM", _config("phi", **TEXT)),
    "phi3": ("Phi3ForCausalLM", _config("phi3", **TEXT)),  # fused qkv and gate_up
    "qwen2": ("Qwen2ForCausalLM", _config("qwen2", **TEXT, tie_word_embeddings=True)),
    "qwen3": ("Qwen3ForCausalLM", _config("qwen3", **TEXT, tie_word_embeddings=True)),
    "gemma": ("GemmaForCausalLM", _config("gemma", **TEXT)),
    "gemma2": ("Gemma2ForCausalLM", _config("gemma2", **GEMMA3)),
    "gemma3_text": ("Gemma3ForCausalLM", _config("gemma3_text", **GEMMA3)),  # many buffers
    "olmo2": ("Olmo2ForCausalLM", _config("olmo2", **TEXT)),
    "cohere": ("CohereForCausalLM", _config("cohere", **TEXT)),
    "granite": ("GraniteForCausalLM", _config("granite", **TEXT)),
    "stablelm": ("StableLmForCausalLM", _config("stablelm", **TEXT)),
    "starcoder2": ("Starcoder2ForCausalLM", _config("starcoder2", **TEXT)),
    "glm4": ("Glm4ForCausalLM", _config("glm4", **TEXT)),
    "nemotron": ("NemotronForCausalLM", _config("nemotron", **TEXT)),
    "smollm3": ("SmolLM3ForCausalLM", _config("smollm3", **TEXT)),
    "hrm_text": ("HrmTextForCausalLM", _config("hrm_text", **TEXT)),  # chunked
    "gpt2": ("GPT2LMHeadModel", _config("gpt2", vocab_size=96, n_embd=32, n_layer=2, n_head=4,
                                        n_positions=64, bos_token_id=1, eos_token_id=2)),
    "gptj": ("GPTJForCausalLM", _config("gptj", vocab_size=96, n_embd=32, n_layer=2, n_head=4,
                                        n_positions=64, rotary_dim=4, bos_token_id=1,
                                        eos_token_id=2)),
    "gpt_neox": ("GPTNeoXForCausalLM", _config("gpt_neox", **TEXT)),  # embed_out is the head
    "falcon": ("FalconForCausalLM", _config("falcon", **_NO_HEAD_DIM)),
    "bloom": ("BloomForCausalLM", _config("bloom", vocab_size=96, hidden_size=32, n_layer=2,
                                          n_head=4)),
    "mpt": ("MptForCausalLM", _config("mpt", vocab_size=96, d_model=32, n_layers=2, n_heads=4,
                                      max_seq_len=64)),
    "opt": ("OPTForCausalLM", _config("opt", **TEXT, ffn_dim=48, word_embed_proj_dim=32)),
    # Mixtures of experts: merged, concatenated, renamed; routers with biases that are buffers.
    "mixtral": ("MixtralForCausalLM", _config("mixtral", **MOE)),
    "qwen2_moe": ("Qwen2MoeForCausalLM", _config("qwen2_moe", **MOE)),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _config("qwen3_moe", **MOE)),
    "olmoe": ("OlmoeForCausalLM", _config("olmoe", **MOE)),
    "flex_olmo": ("FlexOlmoForCausalLM", _config("flex_olmo", **MOE)),
    "phimoe": ("PhimoeForCausalLM", _config("phimoe", **MOE)),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _config("deepseek_v3", **{**MOE, **MLA})),
    "glm4_moe": ("Glm4MoeForCausalLM", _config("glm4_moe", **MOE)),
    "dots1": ("Dots1ForCausalLM", _config("dots1", **MOE)),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", _config("ernie4_5_moe", **MOE, moe_k=2,
                                                        moe_num_experts=4)),
    "granitemoe": ("GraniteMoeForCausalLM", _config("granitemoe", **MOE)),
    "llama4_text": ("Llama4ForCausalLM", _config(  # fused experts, packed in their columns
        "llama4_text", **MOE, interleave_moe_layer_step=1, intermediate_size_mlp=48)),
    "gpt_oss": ("GptOssForCausalLM", _config("gpt_oss", **MOE, sliding_window=16)),  # sinks
    "qwen3_next": ("Qwen3NextForCausalLM", _config(
        "qwen3_next", **MOE, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"])),
    "minimax": ("MiniMaxForCausalLM", _config("minimax", **MOE, block_size=16)),
    # State spaces and mixed kinds.
    "mamba": ("MambaForCausalLM", _config("mamba", vocab_size=96, hidden_size=32, state_size=8,
                                          num_hidden_layers=2)),
    "mamba2": ("Mamba2ForCausalLM", _config("mamba2", vocab_size=96, hidden_size=32, state_size=8,
                                            num_hidden_layers=2, num_heads=4, head_dim=16,
                                            n_groups=1, chunk_size=8)),
    "falcon_mamba": ("FalconMambaForCausalLM", _config("falcon_mamba", vocab_size=96,
                                                       hidden_size=32, state_size=8,
                                                       num_hidden_layers=2)),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", _config(
        "recurrent_gemma", **{**TEXT, "num_hidden_layers": 3}, lru_width=32,
        attention_window_size=16)),
    "jamba": ("JambaForCausalLM", _config(
        "jamba", **MOE, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, mamba_d_state=4, use_mamba_kernels=False)),
    # Encoders.
    "bert": ("BertForMaskedLM", _config("bert", **TEXT)),  # two ties, position_ids
    "roberta": ("RobertaForMaskedLM", _config("roberta", **TEXT)),
    "distilbert": ("DistilBertForMaskedLM", _config("distilbert", vocab_size=96, dim=32, n_layers=2,
                                                    n_heads=4, hidden_dim=48)),
    "electra": ("ElectraForMaskedLM", _config("electra", **TEXT, embedding_size=16)),
    "albert": ("AlbertForMaskedLM", _config("albert", **TEXT, embedding_size=16)),  # shared layers
    "deberta_v2": ("DebertaV2ForMaskedLM", _config("deberta-v2", **TEXT)),
    "modernbert": ("ModernBertForMaskedLM", _config("modernbert", **TEXT)),
    "nomic_bert": ("NomicBertForMaskedLM", _config("nomic_bert", **TEXT)),  # chunked qkv
    "gte": ("GteModel", _config("gte", **TEXT)),
    "jina_embeddings_v3": ("JinaEmbeddingsV3Model", _config("jina_embeddings_v3", **TEXT)),
    # Encoder-decoders: three ties each.
    "t5": ("T5ForConditionalGeneration", _config("t5", vocab_size=96, d_model=32, d_kv=8, d_ff=48,
                                                 num_layers=2, num_heads=4,
                                                 decoder_start_token_id=0)),
    "bart": ("BartForConditionalGeneration", _config("bart", **SEQ2SEQ)),
    "marian": ("MarianMTModel", _config("marian", **SEQ2SEQ)),  # sinusoids, final_logits_bias
    "pegasus": ("PegasusForConditionalGeneration", _config("pegasus", **SEQ2SEQ)),
    "encoder_decoder": ("EncoderDecoderModel", _encoder_decoder),
    # Vision, with and without language.
    "vit": ("ViTForImageClassification", _config("vit", **VIT)),
    "dinov2": ("Dinov2Model", _config("dinov2", **VIT)),
    "resnet": ("ResNetForImageClassification", _config(
        "resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])),  # integer buffers
    "convnext": ("ConvNextModel", _config("convnext", hidden_sizes=[8, 16], depths=[1, 1],
                                          num_stages=2)),
    "clip": ("CLIPModel", _clip),
    "siglip": ("SiglipModel", _siglip),
    "llava": ("LlavaForConditionalGeneration", _llava),  # every key is renamed
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", _qwen2_vl),
    # Transposed experts; experts that are split between text and images.
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", _qwen3_vl_moe),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoeForConditionalGeneration", _ernie4_5_vl_moe),
    "kimi_k25": ("Kimi_K25ForConditionalGeneration", _kimi_k25),  # permuted for rope
    "gemma3": ("Gemma3ForConditionalGeneration", _gemma3),
    # Audio.
    "whisper": ("WhisperForConditionalGeneration", _config(
        "whisper", **SEQ2SEQ, num_mel_bins=8, max_source_positions=16, max_target_positions=16,
        suppress_tokens=None, begin_suppress_tokens=None)),
    "wav2vec2": ("Wav2Vec2ForCTC", _config("wav2vec2", **SPEECH)),  # weight norm
    "hubert": ("HubertForCTC", _config("hubert", **SPEECH)),
}  # fmt: skip


def build(name: str) -> Any:
    """A perturbed model, in evaluation mode; the same for the same name."""
    class_name, config = ARCHITECTURES[name]
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, class_name)(config()).eval()
    return perturbed(model)


def saved(name: str, factory: pytest.TempPathFactory) -> Path:
    """A directory with the model of this name, in several shards."""
    path = factory.mktemp(name)
    build(name).save_pretrained(path, max_shard_size="30KB")
    return path


def saved_speech(path: Path) -> Path:
    """The directory, with a model that has adapters for "eng" and "deu", unlike its own weights."""
    _, config = ARCHITECTURES["wav2vec2"]
    torch.manual_seed(0)
    sizes = {**config().to_dict(), "adapter_attn_dim": 8}
    model = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**sizes))
    perturbed(model).save_pretrained(path)
    for language in ("eng", "deu"):
        save_file(perturbed(model)._get_adapters(), path / f"adapter.{language}.safetensors")
    return path


def perturbed(model: Any) -> Any:
    """The model, with every parameter moved away from where its initialisation puts it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """A fixed input that its forward takes."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (1, 8), generator=generator)
    main = model.main_input_name
    image = torch.randn(1, 3, 32, 32, generator=generator)
    if model.config.model_type in ("clip", "siglip"):
        return {"pixel_values": image, "input_ids": ids}
    if main == "pixel_values":
        return {"pixel_values": image}
    if main == "input_values":
        return {"input_values": torch.randn(1, 800, generator=generator)}
    if main == "input_features":
        features = torch.randn(1, model.config.num_mel_bins, 32, generator=generator)
        return {"input_features": features, "decoder_input_ids": ids}
    if model.config.is_encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": ids}
    return {"input_ids": ids}


def answers(model: Any) -> list[torch.Tensor]:
    """All tensors that a forward pass gives, in their order."""
    torch.manual_seed(0)
    with torch.no_grad():
        given = model(**inputs_of(model), return_dict=True)
    return list(_tensors(given))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Same dtype, shape, strides and bits; NaNs count as what they are."""
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    if one.device.type == "meta":
        return True
    if hasattr(one, "__tensor_flatten__"):  # a quantized tensor, made of others
        names, others = (t.__tensor_flatten__()[0] for t in (one, other))
        return names == others and all(
            same_bytes(getattr(one, name), getattr(other, name)) for name in names
        )
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*raw)


def ties_of(model: Any) -> set[frozenset[str]]:
    """The groups of names that share their memory."""
    groups: dict[int, set[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), set()).add(name)
    return {frozenset(names) for names in groups.values() if len(names) > 1}


def differences(stock: Any, ours: Any) -> list[str]:
    """What is not equal between two loaded models; empty where nothing is."""
    found = []
    one, other = stock.state_dict(), ours.state_dict()
    if list(one) != list(other):
        found.append(f"keys: {set(one) ^ set(other) or 'their order'}")
    found += [f"tensor {n}" for n in one if n in other and not same_bytes(one[n], other[n])]
    one, other = dict(stock.named_buffers()), dict(ours.named_buffers())
    if list(one) != list(other):
        found.append(f"buffers: {set(one) ^ set(other)}")
    found += [f"buffer {n}" for n in one if n in other and not same_bytes(one[n], other[n])]
    facts: dict[str, Callable[[Any], Any]] = {
        "type": type,
        "ties": ties_of,
        "training": lambda m: [m.training for m in m.modules()],
        "requires_grad": lambda m: [p.requires_grad for p in m.parameters()],
        "name_or_path": lambda m: m.name_or_path,
        "config": lambda m: m.config.to_dict(),
        "generation": lambda m: (
            g.to_diff_dict() if (g := getattr(m, "generation_config", None)) else None
        ),
        "conversions": lambda m: repr(getattr(m, "_weight_conversions", None)),
        "used": lambda m: [
            c.was_used()
            for c in getattr(m, "_weight_conversions", None) or ()
            if hasattr(c, "was_used")
        ],
        "device map": lambda m: getattr(m, "hf_device_map", None),
    }
    found += [name for name, fact in facts.items() if fact(stock) != fact(ours)]
    return found


def files_of(directory: Path) -> dict[str, bytes]:
    """The weights files of a directory, by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors*"))}
