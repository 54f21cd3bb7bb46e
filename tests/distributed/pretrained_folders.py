"""Folders of tiny models with random weights, as Transformers and older libraries write them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from tests.distributed.huggingface_jobs import CONFIGS

#: How weights are written: by Transformers into one file or several, by ``torch.save`` into one or several.
SINGLE, SHARDED, ARCHIVE, ARCHIVES = "single", "sharded", "archive", "archives"
_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_BERT = transformers.BertConfig(vocab_size=37, max_position_embeddings=32, **_SIZES)
_T5 = transformers.T5Config(vocab_size=37, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
_CLIP = transformers.CLIPConfig(
    text_config={**_SIZES, "vocab_size": 37, "max_position_embeddings": 16, "projection_dim": 12},
    vision_config={**_SIZES, "image_size": 8, "patch_size": 4, "projection_dim": 12},
    projection_dim=12,
)
_WHISPER = transformers.WhisperConfig(
    vocab_size=37,
    d_model=16,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    num_mel_bins=8,
    max_source_positions=16,
    max_target_positions=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
_QWEN = transformers.Qwen2MoeConfig(
    vocab_size=37,
    **_SIZES,
    num_key_value_heads=2,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=20,
    num_experts=3,
    num_experts_per_tok=2,
    decoder_sparse_step=2,
)
_RESNET = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic")


@dataclass(frozen=True)
class Model:
    """A folder, and the model that is loaded from it.

    Attributes:
        config: of both.
        saved, loaded: their classes.
        how: the folder is written.
        dtype: of the folder.
    """

    config: transformers.PreTrainedConfig
    saved: str
    loaded: str
    how: str = SINGLE
    dtype: str = "float32"


MODELS = {
    "llama": Model(CONFIGS["llama"], "LlamaForCausalLM", "LlamaForCausalLM", SHARDED),
    "llama, bfloat16": Model(CONFIGS["llama"], "LlamaForCausalLM", "LlamaForCausalLM", dtype="bfloat16"),
    "llama, prefix added": Model(CONFIGS["llama"], "LlamaModel", "LlamaForCausalLM"),
    "llama, prefix dropped": Model(CONFIGS["llama"], "LlamaForCausalLM", "LlamaModel", SHARDED, "float16"),
    "gpt2": Model(CONFIGS["gpt2"], "GPT2LMHeadModel", "GPT2LMHeadModel"),
    "gpt2, prefix added": Model(CONFIGS["gpt2"], "GPT2Model", "GPT2LMHeadModel"),
    "gpt2, archive": Model(CONFIGS["gpt2"], "GPT2LMHeadModel", "GPT2LMHeadModel", ARCHIVE),
    "mixtral": Model(CONFIGS["mixtral"], "MixtralForCausalLM", "MixtralForCausalLM", SHARDED),
    "qwen2_moe": Model(_QWEN, "Qwen2MoeForCausalLM", "Qwen2MoeForCausalLM", ARCHIVES, "bfloat16"),
    "t5": Model(_T5, "T5ForConditionalGeneration", "T5ForConditionalGeneration"),
    "t5, encoder": Model(_T5, "T5ForConditionalGeneration", "T5EncoderModel", ARCHIVE),
    "bert": Model(_BERT, "BertModel", "BertForMaskedLM"),
    "bert, another head": Model(_BERT, "BertForPreTraining", "BertForSequenceClassification", ARCHIVES),
    # as a whole it has a parameter without dimensions, which DeepSpeed 0.19.8 cannot broadcast
    "clip, text": Model(_CLIP, "CLIPModel", "CLIPTextModel"),
    "clip, images": Model(_CLIP, "CLIPModel", "CLIPVisionModelWithProjection", ARCHIVE),
    "whisper": Model(_WHISPER, "WhisperForConditionalGeneration", "WhisperForConditionalGeneration", SHARDED),
    "resnet": Model(_RESNET, "ResNetForImageClassification", "ResNetForImageClassification"),
}


def save(case: dict[str, Any]) -> None:
    """:func:`write` the model ``setup`` into ``folder``: a job of one rank."""
    write(case["setup"], Path(case["folder"]))


def save_adapter(case: dict[str, Any]) -> None:
    """Write an adapter of the model in ``source`` into ``folder``, which names it: a job of one rank."""
    base = transformers.LlamaForCausalLM.from_pretrained(case["source"])
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(case["folder"])


def write(name: str, folder: Path) -> None:
    """Write the folder of a model, with weights and buffers of random values."""
    model, source = MODELS[name], _random(MODELS[name])
    source.save_pretrained(folder, max_shard_size="20KB" if model.how == SHARDED else "1GB")
    if model.how not in (ARCHIVE, ARCHIVES):
        return
    state = transformers.core_model_loading.revert_weight_conversion(source, source.state_dict())
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    names = sorted(state)
    parts = [names] if model.how == ARCHIVE else [names[::2], names[1::2]]
    files = ["pytorch_model.bin"] if model.how == ARCHIVE else [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    for file, part in zip(files, parts, strict=True):
        torch.save({key: state[key] for key in part}, folder / file)
    if model.how == ARCHIVES:
        index = {key: file for file, part in zip(files, parts, strict=True) for key in part}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _random(model: Model) -> Any:
    torch.manual_seed(5)
    source = getattr(transformers, model.saved)(model.config).to(getattr(torch, model.dtype))
    for tensor in source.state_dict().values():
        tensor.copy_(
            torch.randint(-9, 9, tensor.shape) if not tensor.is_floating_point() else torch.randn(tensor.shape)
        )
    return source
