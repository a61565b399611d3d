"""A decoder-only transformer with a paged KV cache, small enough for a CPU and complete enough to
show what an inference server has: RMS norm, rotary positions, grouped-query attention, blocks.

The weights are random, from a seed: every process that passes the same seed has the same model. A
token is a byte. Sequences are computed one at a time, so that every process gets the same floating-
point numbers, and thus the same greedy tokens, whatever other requests it serves.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; ``num_heads`` is a multiple of ``num_kv_heads``."""

    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    mlp_size: int = 256
    rope_base: float = 10_000.0
    block_size: int = 16  # tokens of a block of the KV cache
    seed: int = 20


class PagedCache:
    """Keys and values of every layer, in blocks of ``block_size`` tokens.

    Attributes:
        layers: layer name -> float32 tensor of shape ``(num_blocks, num_kv_heads, block_size,
            2 * head_dim)``; a token's key, then its value.
    """

    def __init__(self, config: ModelConfig, num_blocks: int) -> None:
        shape = (num_blocks, config.num_kv_heads, config.block_size, 2 * config.head_dim)
        self.block_size = config.block_size
        self.layers = {f"layers.{i}": torch.zeros(shape) for i in range(config.num_layers)}

    def write(self, layer: str, block_ids: Tensor, start: int, keys_values: Tensor) -> None:
        """Store the tokens from position ``start`` on; ``keys_values`` is ``(num_kv_heads, tokens,
        2 * head_dim)``."""
        positions = torch.arange(start, start + keys_values.shape[1])
        blocks = block_ids[positions // self.block_size]
        offsets = positions % self.block_size
        self.layers[layer][blocks, :, offsets] = keys_values.transpose(0, 1)

    def read(self, layer: str, block_ids: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``num_tokens`` positions, each ``(num_kv_heads, num_tokens,
        head_dim)``."""
        num_blocks = math.ceil(num_tokens / self.block_size)
        blocks = self.layers[layer][block_ids[:num_blocks]]
        heads = blocks.transpose(0, 1).flatten(1, 2)[:, :num_tokens]
        keys, values = heads.chunk(2, dim=-1)
        return keys, values


class BlockAllocator:
    """Hands out block ids in random order, as a pool that has been in use for a while does."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._random = random.Random(seed)
        self._random.shuffle(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks, or None when so many are not free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def free(self, block_ids: Iterable[int]) -> None:
        self._free.extend(block_ids)
        self._random.shuffle(self._free)


@dataclass
class _Layer:
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class Transformer:
    """Pre-norm transformer: attention with rotary positions and grouped queries, gated MLP.

    The gains on queries and keys make attention pick few tokens, and the one on the attention's
    output makes the residual stream follow it. Without them the greedy tokens of random weights
    hardly depend on the KV cache, and a wrong block would go unnoticed.

    Keys are stored without their positions and rotated when they are read. A key that is stored
    rotated is attended to alike wherever its block stands, so that blocks in the wrong order would
    go unnoticed too.
    """

    QUERY_KEY_GAIN = 1.6
    ATTENTION_GAIN = 2.0

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(config.seed)

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

        self.embedding = torch.randn(VOCABULARY, config.hidden_size, generator=generator)
        self.head = weight(VOCABULARY, config.hidden_size)
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.layers: list[_Layer] = []
        for _ in range(config.num_layers):
            qkv = weight(query_size + 2 * kv_size, config.hidden_size)
            qkv[: query_size + kv_size] *= self.QUERY_KEY_GAIN
            self.layers.append(
                _Layer(
                    qkv=qkv,
                    out=weight(config.hidden_size, query_size) * self.ATTENTION_GAIN,
                    gate_up=weight(2 * config.mlp_size, config.hidden_size),
                    down=weight(config.hidden_size, config.mlp_size),
                )
            )

    def forward(
        self, tokens: Sequence[int], start: int, cache: PagedCache, block_ids: Sequence[int]
    ) -> Tensor:
        """Compute tokens of one sequence and store their keys and values.

        Args:
            tokens: the tokens at the positions from ``start`` on; the cache already holds those
                before.
            block_ids: the sequence's blocks, enough for ``start + len(tokens)`` tokens.

        Returns:
            The logits after the last token, shape ``(VOCABULARY,)``.
        """
        blocks = torch.tensor(block_ids)
        context = torch.arange(start + len(tokens))
        positions = context[start:]
        hidden = self.embedding[torch.tensor(list(tokens))]
        for number, layer in enumerate(self.layers):
            name = f"layers.{number}"
            query, key, value = self.project(layer, hidden)
            cache.write(name, blocks, start, torch.cat((key, value), dim=-1))
            keys, values = cache.read(name, blocks, len(context))
            query, keys = self.rotate(query, positions), self.rotate(keys, context)
            hidden = self.finish_layer(layer, hidden, attend(query, keys, values, positions))
        return self.head @ rms_norm(hidden[-1])

    def project(self, layer: _Layer, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``(heads, tokens, head_dim)``."""
        config = self.config
        heads = (rms_norm(hidden) @ layer.qkv.T).unflatten(-1, (-1, config.head_dim))
        query, key, value = heads.transpose(0, 1).split(
            (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        )
        return query, key, value

    def rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotary position embedding of ``(heads, tokens, head_dim)``."""
        half = heads.shape[-1] // 2
        frequencies = self.config.rope_base ** (-torch.arange(half) / half)
        angles = positions[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def finish_layer(self, layer: _Layer, hidden: Tensor, attention: Tensor) -> Tensor:
        """Add the attention's output and the MLP to the residual stream."""
        hidden = hidden + attention.transpose(0, 1).flatten(1) @ layer.out.T
        gate, up = (rms_norm(hidden) @ layer.gate_up.T).chunk(2, dim=-1)
        return hidden + (functional.silu(gate) * up) @ layer.down.T


def rms_norm(hidden: Tensor) -> Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)


def attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Causal grouped-query attention of queries at ``positions`` to the keys from position 0 on.

    Shapes: query ``(heads, tokens, head_dim)``, keys and values ``(kv_heads, context, head_dim)``.
    """
    groups = query.unflatten(0, (keys.shape[0], -1))
    scores = groups @ keys[:, None].transpose(-1, -2) / math.sqrt(query.shape[-1])
    future = torch.arange(keys.shape[1]) > positions[:, None]
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return (weights @ values[:, None]).flatten(0, 1)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-num_tokens // block_size)


def generate(model: Transformer, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy decoding in one process: what a server has to reproduce."""
    config = model.config
    num_blocks = blocks_for(len(prompt) + max_tokens, config.block_size)
    cache = PagedCache(config, num_blocks)
    block_ids = list(range(num_blocks))
    tokens: list[int] = []
    logits = model.forward(prompt, 0, cache, block_ids)
    for position in range(len(prompt), len(prompt) + max_tokens):
        tokens.append(int(logits.argmax()))
        if len(tokens) < max_tokens:
            logits = model.forward(tokens[-1:], position, cache, block_ids)
    return tokens
