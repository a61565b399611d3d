"""The KV cache shapes of well-known models, as their public configurations give them."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}


@dataclass(frozen=True)
class ModelShape:
    """What a model keeps per token.

    Attributes:
        layers: layers that have a KV cache.
        kv_heads: KV heads per layer that this worker holds.
        head_size: elements per head.
        dtype: a key of `DTYPE_BYTES`.
        mla: multi-head latent attention: one vector per token and layer instead of K and V.
        note: what a reader should know about these numbers.
    """

    name: str
    layers: int
    kv_heads: int
    head_size: int
    dtype: str = "bfloat16"
    mla: bool = False
    note: str = ""

    @property
    def token_bytes(self) -> int:
        """Bytes per token and layer."""
        vectors = 1 if self.mla else 2
        return vectors * self.kv_heads * self.head_size * DTYPE_BYTES[self.dtype]

    def describe(self) -> str:
        """``"32 layers, 8 KV heads of 128, bfloat16"``."""
        if self.mla:
            heads = f"one latent vector of {self.kv_heads * self.head_size}"
        elif self.kv_heads == 1:
            heads = f"1 KV head of {self.head_size}"
        else:
            heads = f"{self.kv_heads} KV heads of {self.head_size}"
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        return f"{layers}, {heads}, {self.dtype}"


_SHAPES = (
    ModelShape("llama-3.1-8b", 32, 8, 128),
    ModelShape("llama-3.1-70b", 80, 1, 128, note="one of 8 tensor-parallel ranks"),
    ModelShape("llama-3.1-405b", 126, 1, 128, note="one of 8 tensor-parallel ranks"),
    ModelShape("qwen3-8b", 36, 8, 128),
    ModelShape("qwen3-32b", 64, 8, 128),
    ModelShape("qwen3-30b-a3b", 48, 4, 128),
    ModelShape("deepseek-v3", 61, 1, 576, mla=True, note="latent 512 + rotary 64, on every rank"),
    ModelShape("mistral-7b", 32, 8, 128),
    ModelShape("phi-4", 40, 10, 128),
    ModelShape("gpt-oss-20b", 24, 8, 64, note="all layers as if they kept every token"),
    ModelShape("gpt-oss-120b", 36, 8, 64, note="all layers as if they kept every token"),
    ModelShape("gemma-3-27b", 62, 16, 128, note="all layers as if they kept every token"),
)

MODELS = {shape.name: shape for shape in _SHAPES}
DEFAULT_MODEL = "llama-3.1-8b"
