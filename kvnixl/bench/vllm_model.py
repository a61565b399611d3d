"""Tiny models with random weights, made locally, for engines that run on any machine.

Greedy tokens of such a model depend on every part of the KV cache: matrices have rows of unit
variance, and queries, keys and the attention output are amplified. With the small weights that
models are usually initialised with, the residual stream drowns attention and a lost KV cache goes
unnoticed.

One token is one byte. Next to the weights lies a matching tokenizer, which engines that are driven
with token ids need not load.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Kind: TypeAlias = Literal["llama", "hybrid", "mla"]
Matrix: TypeAlias = npt.NDArray[np.float32]

# 256 bytes, then these, then ids nobody uses, so that the vocabulary splits evenly over ranks.
BYTE_TOKENS = 256
BOS_TOKEN_ID, EOS_TOKEN_ID = 256, 257
VOCAB_SIZE = 320

QUERY_KEY_GAIN = 1.6
ATTENTION_OUTPUT_GAIN = 2.0
# A directory is named after its contents; a change of this module needs another number.
_FORMAT = 1


@dataclass(frozen=True)
class TinyModel:
    """
    Attributes:
        kind: ``llama``: full attention in all layers. ``hybrid``: the same, with sliding-window
            attention in every other layer, which makes two KV cache groups. ``mla``: the latent
            attention of DeepSeek-V2, with dense MLPs.
        sliding_window: tokens (``hybrid`` only).
        max_position: longest sequence, in tokens.
        seed: of the weights.
    """

    kind: Kind = "llama"
    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 8
    num_kv_heads: int = 4
    head_size: int = 64
    sliding_window: int = 128
    max_position: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        kinds = Kind.__args__  # type: ignore[attr-defined]
        if self.kind not in kinds:
            raise ValueError(f"kind {self.kind!r} is not one of {', '.join(kinds)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )


# Sizes of the latent attention. 512 and 64 are what its kernels are compiled for.
_LATENT, _ROPE, _NOPE, _VALUE = 512, 64, 64, 64


def make_model(directory: Path, model: TinyModel) -> Path:
    """The directory of the model under `directory`; made unless it is there already.

    Several processes may do this at once: the result appears complete or not at all.
    """
    described = json.dumps([_FORMAT, asdict(model)], sort_keys=True).encode()
    target = directory / f"{model.kind}-{hashlib.sha256(described).hexdigest()[:12]}"
    if target.is_dir():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=directory))
    try:
        _write(work, model)
        work.chmod(0o755)
        os.rename(work, target)
    except OSError:
        shutil.rmtree(work, ignore_errors=True)
        if not target.is_dir():  # another process was faster otherwise
            raise
    return target


def _write(directory: Path, model: TinyModel) -> None:
    from safetensors.numpy import save_file

    tensors = dict(_tensors(model))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config(model), indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    _write_tokenizer(directory)


def _config(model: TinyModel) -> dict[str, Any]:
    """The ``config.json`` of transformers."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": 2 * model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": model.max_position,
        "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "float32",
    }
    if model.kind == "hybrid":
        config["sliding_window"] = model.sliding_window
        config["layer_types"] = [
            "full_attention" if layer % 2 else "sliding_attention"
            for layer in range(model.num_layers)
        ]
    if model.kind == "mla":
        config |= {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": model.num_heads,
            "head_dim": _ROPE,
            "kv_lora_rank": _LATENT,
            "q_lora_rank": None,
            "qk_rope_head_dim": _ROPE,
            "qk_nope_head_dim": _NOPE,
            "v_head_dim": _VALUE,
            # Every layer is dense, but the architecture wants to know its experts.
            "first_k_dense_replace": model.num_layers,
            "moe_layer_freq": 1,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        }
    return config


def _tensors(model: TinyModel) -> Iterator[tuple[str, Matrix]]:
    """Name and value of every weight; matrices have shape ``(outputs, inputs)``."""
    random = np.random.Generator(np.random.PCG64(model.seed))
    hidden, heads = model.hidden_size, model.num_heads

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> Matrix:
        values = random.standard_normal((outputs, inputs), np.float32)
        return np.asarray(values * np.float32(gain / np.sqrt(inputs)), np.float32)

    def ones(size: int) -> Matrix:
        return np.ones(size, np.float32)

    yield "model.embed_tokens.weight", random.standard_normal((VOCAB_SIZE, hidden), np.float32)
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        if model.kind == "mla":
            query_size = heads * (_NOPE + _ROPE)
            yield f"{attention}.q_proj.weight", matrix(query_size, hidden, QUERY_KEY_GAIN)
            latent = matrix(_LATENT + _ROPE, hidden, QUERY_KEY_GAIN)
            yield f"{attention}.kv_a_proj_with_mqa.weight", latent
            yield f"{attention}.kv_a_layernorm.weight", ones(_LATENT)
            expand = matrix(heads * (_NOPE + _VALUE), _LATENT)
            # A head's rows are its keys, then its values.
            expand.reshape(heads, _NOPE + _VALUE, _LATENT)[:, :_NOPE] *= QUERY_KEY_GAIN
            yield f"{attention}.kv_b_proj.weight", expand
            attended = heads * _VALUE
        else:
            kv_size, attended = model.num_kv_heads * model.head_size, heads * model.head_size
            yield f"{attention}.q_proj.weight", matrix(attended, hidden, QUERY_KEY_GAIN)
            yield f"{attention}.k_proj.weight", matrix(kv_size, hidden, QUERY_KEY_GAIN)
            yield f"{attention}.v_proj.weight", matrix(kv_size, hidden)
        yield f"{attention}.o_proj.weight", matrix(hidden, attended, ATTENTION_OUTPUT_GAIN)
        yield f"{prefix}.mlp.gate_proj.weight", matrix(2 * hidden, hidden)
        yield f"{prefix}.mlp.up_proj.weight", matrix(2 * hidden, hidden)
        yield f"{prefix}.mlp.down_proj.weight", matrix(hidden, 2 * hidden)
        yield f"{prefix}.input_layernorm.weight", ones(hidden)
        yield f"{prefix}.post_attention_layernorm.weight", ones(hidden)
    yield "model.norm.weight", ones(hidden)
    yield "lm_head.weight", matrix(VOCAB_SIZE, hidden)


def _write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: the id of a byte's token is the byte's value."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = _printable_bytes()
    tokenizer = Tokenizer(models.BPE(vocab={alphabet[b]: b for b in range(BYTE_TOKENS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<bos>", "<eos>"]
    filler = [f"<unused-{number}>" for number in range(EOS_TOKEN_ID + 1, VOCAB_SIZE)]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special + filler])
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[0],
        "eos_token": special[1],
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=1))


def _printable_bytes() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary.

    Bytes that print in Latin-1 stand for themselves, the others follow from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTE_TOKENS)]
