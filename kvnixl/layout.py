"""Where the KV cache of one rank lies in memory: `Region` and `CacheLayout`, and their builders.

A *block* holds the keys and values of ``block_size`` tokens of one cache group. A *region* is a run
of equally long blocks in one buffer: block ``b`` is the ``block_len`` bytes from
``base + b * block_stride`` on. Blocks here are what the attention kernel calls a block. Where an
engine counts in larger, logical blocks, one of those is ``kernel_blocks_per_block`` neighbours.

Inside a block the bytes have the order ``[planes][heads][tokens][content]`` (``HND``) or
``[planes][tokens][heads][content]`` (``NHD``); a replicated cache (MLA) is ``[planes][tokens]
[content]``. Usually there is one plane, with K and V together in the content or in regions of their
own; a block that holds K and then V has two, a block that holds all layers has one for each.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from kvnixl.errors import LayoutError

MemType = Literal["DRAM", "VRAM"]

# vLLM's group id, in an engine's metadata, of a region that several cache groups share.
SHARED_GROUP: Final = -1

# Name of the layout -> whether the heads stand outside the tokens. The five-letter names are
# vLLM's: layers, blocks, heads, tokens, content from the outermost axis on.
_HEAD_MAJOR: Final = {
    "HND": True,
    "LBHNC": True,
    "BLHNC": True,
    "NHD": False,
    "LBNHC": False,
    "BLNHC": False,
}

_ADDRESS_LIMIT: Final = 2**64


def natural_key(name: str) -> tuple[str | int, ...]:
    """Sort key that compares digits as numbers: ``layers.2`` comes before ``layers.10``."""
    parts = re.split(r"([0-9]+)", name)
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts))


def is_head_major(kv_layout: str) -> bool:
    """Whether each head's tokens are contiguous in a block (``HND``).

    Raises:
        LayoutError: the layout is unknown, or puts heads or tokens outside the blocks.
    """
    try:
        return _HEAD_MAJOR[kv_layout]
    except KeyError:
        raise LayoutError(
            f"KV cache layout {kv_layout!r} is not supported; use one of {', '.join(_HEAD_MAJOR)}"
        ) from None


# --- values -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackedMember:
    """One layer's page in a block that holds the pages of several layers.

    Attributes:
        layer: name of the layer.
        offset: bytes from the start of the block.
        length: bytes of the page.
        planes: equal outer parts of the page, as in `Region`.
    """

    layer: str
    offset: int
    length: int
    planes: int = 1

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise LayoutError(
                f"packed member {self.layer!r}: offset {self.offset} must be at least 0 and length "
                f"{self.length} at least 1"
            )
        if self.planes < 1 or self.length % self.planes:
            raise LayoutError(
                f"packed member {self.layer!r}: {self.length} bytes cannot be cut into "
                f"{self.planes} planes"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A run of equally long blocks in one buffer.

    Attributes:
        base: address of block 0.
        block_len: bytes of a block that are transferred.
        block_stride: bytes from one block to the next, at least ``block_len``.
        num_blocks: number of (kernel) blocks.
        num_kv_heads: KV heads of the whole model, over all ranks, in these layers. A rank holds
            ``num_kv_heads / tp_size`` of them, or one that several ranks hold.
        replicated: every rank holds the same bytes (MLA); ``num_kv_heads`` does not count then.
        planes: equal outer parts of a block (see the module's description).
        mem_type: ``"DRAM"`` or ``"VRAM"``, as NIXL names them.
        device_id: device of the memory, 0 for DRAM.
        groups: the cache groups whose block ids address the region, in ascending order. Several
            where layers of different groups share one buffer (vLLM's hybrid allocator).
        layers: names of the layers in the region. Several without ``packed``: they share each
            block's whole length.
        packed: the layers' pages in each block, in order of their offsets, when a block holds
            several.
    """

    base: int
    block_len: int
    block_stride: int
    num_blocks: int
    num_kv_heads: int = 1
    replicated: bool = False
    planes: int = 1
    mem_type: MemType = "DRAM"
    device_id: int = 0
    groups: tuple[int, ...] = (0,)
    layers: tuple[str, ...] = ()
    packed: tuple[PackedMember, ...] = ()

    def __post_init__(self) -> None:
        if self.block_len < 1 or self.num_blocks < 1:
            raise LayoutError(
                f"{self}: block_len {self.block_len} and num_blocks {self.num_blocks} must be "
                "at least 1"
            )
        if self.block_stride < self.block_len:
            raise LayoutError(
                f"{self}: block_stride {self.block_stride} is smaller than block_len "
                f"{self.block_len}, so blocks overlap"
            )
        if self.base < 0 or self.end > _ADDRESS_LIMIT:
            raise LayoutError(
                f"{self}: base {self.base:#x} with {self.num_blocks} blocks of {self.block_stride} "
                "bytes leaves the 64-bit address space"
            )
        if self.num_kv_heads < 1:
            raise LayoutError(f"{self}: num_kv_heads {self.num_kv_heads} must be at least 1")
        if self.planes < 1 or self.block_len % self.planes:
            raise LayoutError(
                f"{self}: block_len {self.block_len} cannot be cut into {self.planes} planes"
            )
        if self.mem_type not in ("DRAM", "VRAM"):
            raise LayoutError(f"{self}: mem_type {self.mem_type!r} must be 'DRAM' or 'VRAM'")
        if self.device_id < 0 or self.device_id >= _ADDRESS_LIMIT:
            raise LayoutError(f"{self}: device_id {self.device_id} is outside 0 .. 2**64 - 1")
        if not self.groups or min(self.groups) < 0 or sorted(set(self.groups)) != [*self.groups]:
            raise LayoutError(
                f"{self}: groups {self.groups} must be group numbers in ascending order, at least "
                "one"
            )
        end = 0
        for member in self.packed:
            if member.offset < end or member.offset + member.length > self.block_len:
                raise LayoutError(
                    f"{self}: packed member {member.layer!r} at offset {member.offset} with "
                    f"{member.length} bytes does not fit after byte {end} of a block of "
                    f"{self.block_len} bytes"
                )
            end = member.offset + member.length

    @property
    def name(self) -> str:
        """The first layer's name, or ``""``."""
        return self.layers[0] if self.layers else ""

    @property
    def end(self) -> int:
        """The first address after the last block."""
        return self.base + (self.num_blocks - 1) * self.block_stride + self.block_len

    @property
    def distinct_heads(self) -> int:
        """How many KV heads are spread over the ranks: 1 for a replicated region, which is like a
        single head that every rank has."""
        return 1 if self.replicated else self.num_kv_heads

    @property
    def row(self) -> tuple[int, int, int, int, int]:
        """``(base, block_len, block_stride, num_blocks, device_id)``."""
        return (self.base, self.block_len, self.block_stride, self.num_blocks, self.device_id)

    def __str__(self) -> str:
        return f"region {self.name!r}" if self.layers else f"region at {self.base:#x}"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose blocks are allocated together and share block ids.

    Attributes:
        block_size: tokens of a (kernel) block.
        sliding_window: tokens that the layers attend to, 0 for all of them. The block lists of a
            windowed group hold only the blocks at the end of the sequence.
    """

    block_size: int
    sliding_window: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.sliding_window < 0:
            raise LayoutError(
                f"cache group: block_size {self.block_size} must be at least 1 and sliding_window "
                f"{self.sliding_window} at least 0 tokens"
            )


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Contiguous memory to register with NIXL."""

    base: int
    length: int
    mem_type: MemType
    device_id: int

    @property
    def end(self) -> int:
        return self.base + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """The KV cache of one rank.

    Attributes:
        regions: all regions, in an order that both sides of a transfer reproduce: by `natural_key`
            of the first layer's name. Unnamed regions pair by position.
        groups: the cache groups; `Region.groups` and the block lists of a request count into it.
        kv_layout: ``"HND"`` or ``"NHD"``, or vLLM's name of the layout (``"LBHNC"``).
        kernel_blocks_per_block: kernel blocks of one logical block: logical block ``i`` is the
            kernel blocks ``i * kernel_blocks_per_block`` and following. Block lists of requests
            name logical blocks.
        attn_backend: the engine's name of its attention backend, ``""`` if unknown. Both sides of a
            transfer must have the same.
        token_granular: the tokens of a head lie one after another in a block, so a block can be cut
            between tokens. False where the backend packs them across tokens (vLLM on CPU keeps K
            transposed): then only whole blocks and whole heads can be copied.
        packing: how the backend packs a block, for backends where this differs between machines
            (a CPU's instruction set); ``""`` if it does not. Both sides must have the same.
        memory: what to register with NIXL; empty for a layout of remote memory.
    """

    regions: tuple[Region, ...]
    groups: tuple[CacheGroup, ...]
    kv_layout: str = "HND"
    kernel_blocks_per_block: int = 1
    attn_backend: str = ""
    token_granular: bool = True
    packing: str = ""
    memory: tuple[MemoryRange, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        is_head_major(self.kv_layout)
        if not self.regions:
            raise LayoutError("a cache layout needs at least one region")
        if not self.groups:
            raise LayoutError("a cache layout needs at least one cache group")
        if self.kernel_blocks_per_block < 1:
            raise LayoutError(
                f"kernel_blocks_per_block {self.kernel_blocks_per_block} must be at least 1"
            )
        for region in self.regions:
            if region.groups[-1] >= len(self.groups):
                raise LayoutError(
                    f"{region}: group {region.groups[-1]} does not exist; the layout has "
                    f"{len(self.groups)} cache groups"
                )
            if region.num_blocks < self.kernel_blocks_per_block:
                raise LayoutError(
                    f"{region}: {region.num_blocks} kernel blocks make no logical block of "
                    f"{self.kernel_blocks_per_block}"
                )

        names = Counter(member.layer for region in self.regions for member in region.packed)
        for layer, count in names.items():
            if count > 1:
                raise LayoutError(f"layer {layer!r} is packed into {count} places; it needs one")

    @property
    def block_size(self) -> int:
        """Tokens of a kernel block of the first cache group."""
        return self.groups[0].block_size

    @property
    def head_major(self) -> bool:
        """Whether the heads stand outside the tokens in a block (``HND``)."""
        return is_head_major(self.kv_layout)

    def num_blocks(self, group: int = 0) -> int:
        """How many logical blocks of a cache group can be addressed in all of its regions."""
        counts = [r.num_blocks for r in self.regions if group in r.groups]
        return min(counts, default=0) // self.kernel_blocks_per_block

    def block_bytes(self, group: int = 0) -> int:
        """Bytes of one logical block of a cache group over all regions."""
        lengths = [r.block_len for r in self.regions if group in r.groups]
        return sum(lengths) * self.kernel_blocks_per_block

    def region_rows(self) -> npt.NDArray[np.uint64]:
        """The regions as a uint64 array of shape ``(regions, 5)`` with the columns ``(base,
        block_len, block_stride, num_blocks, device_id)``, for ``kvnixl._descs``."""
        return np.array([region.row for region in self.regions], dtype=np.uint64)

    def metadata_fields(self) -> dict[str, Any]:
        """The fields of vLLM's ``NixlAgentMetadata`` that describe memory, by name."""
        regions = self.regions
        packed = [member for region in regions for member in region.packed]
        has_members = bool(packed) or any(len(region.layers) > 1 for region in regions)
        return {
            "kv_caches_base_addr": [region.base for region in regions],
            "device_id": regions[0].device_id,
            "num_blocks": min(region.num_blocks for region in regions),
            "block_lens": [region.block_len for region in regions],
            "block_strides": [region.block_stride for region in regions],
            "kv_cache_layout": self.kv_layout,
            "block_size": self.block_size,
            "attn_backend_name": self.attn_backend,
            "physical_blocks_per_logical_kv_block": self.kernel_blocks_per_block,
            "region_num_blocks": [region.num_blocks for region in regions],
            "region_group_ids": [_group_id(region) for region in regions],
            "region_names": [r.name for r in regions] if all(r.layers for r in regions) else None,
            "region_mem_types": [region.mem_type for region in regions],
            "region_members": [list(region.layers) for region in regions] if has_members else [],
            "packed_member_layouts": {m.layer: (m.offset, m.length) for m in packed},
        }

    def __str__(self) -> str:
        return format_table(self)


def _group_id(region: Region) -> int:
    return region.groups[0] if len(region.groups) == 1 else SHARED_GROUP


def format_table(layout: CacheLayout) -> str:
    """The layout as a table: a title, and one line for each stretch of regions that are alike."""
    title = (
        f"KV cache: {len(layout.regions)} regions, blocks of "
        f"{' / '.join(str(group.block_size) for group in layout.groups)} tokens, "
        f"{layout.kv_layout}, backend {layout.attn_backend or 'unknown'}"
    )
    if layout.kernel_blocks_per_block > 1:
        title += f", {layout.kernel_blocks_per_block} kernel blocks per block"
    if not layout.token_granular:
        title += ", tokens packed" + (f" ({layout.packing})" if layout.packing else "")
    for number, group in enumerate(layout.groups):
        if group.sliding_window:
            title += f", group {number} has a window of {group.sliding_window} tokens"
    rows = [("regions", "layers", "first base", "block", "stride", "blocks", "memory", "group", "")]
    first = 0
    for look, alike in itertools.groupby(layout.regions, key=_look):
        members = list(alike)
        last = first + len(members) - 1
        rows.append(
            (
                str(first) if first == last else f"{first}-{last}",
                _layer_range(members),
                f"{members[0].base:#x}",
                *look,
            )
        )
        first = last + 1
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([title, *lines])


def _look(region: Region) -> tuple[str, str, str, str, str, str]:
    """What of a region the table shows, apart from its place."""
    kind = "replicated" if region.replicated else f"{region.num_kv_heads} KV heads in all"
    if region.planes > 1:
        kind += f", {region.planes} planes"
    if region.packed:
        kind += f", {len(region.packed)} layers packed"
    elif len(region.layers) > 1:
        kind += f", {len(region.layers)} layers share it"
    return (
        _format_bytes(region.block_len),
        _format_bytes(region.block_stride),
        str(region.num_blocks),
        f"{region.mem_type}:{region.device_id}",
        ",".join(map(str, region.groups)),
        kind,
    )


def _layer_range(regions: Sequence[Region]) -> str:
    names = [name for region in regions for name in region.layers]
    if not names:
        return "-"
    return names[0] if names[0] == names[-1] else f"{names[0]} .. {names[-1]}"


def _format_bytes(length: int) -> str:
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if length >= factor and length % (factor // 16) == 0:
            return f"{length / factor:g} {unit}"
    return f"{length} B"


# --- builders -----------------------------------------------------------------------------------


def layout_from_addresses(
    bases: Mapping[str, int] | Sequence[int],
    *,
    block_len: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    block_stride: int | None = None,
    replicated: bool = False,
    planes: int = 1,
    mem_type: MemType = "DRAM",
    device_id: int = 0,
    kv_layout: str = "HND",
    kernel_blocks_per_block: int = 1,
    attn_backend: str = "",
    token_granular: bool = True,
    packing: str = "",
) -> CacheLayout:
    """The layout of equal regions at known addresses, in one cache group.

    Args:
        bases: address of each region's first block: by layer name (then sorted by `natural_key`),
            or unnamed, in an order that both sides reproduce.
        block_len: bytes of a block in one region.
        num_blocks: number of kernel blocks.
        block_size: tokens of a kernel block.
        num_kv_heads: KV heads of the whole model, over all ranks.
        block_stride: bytes from one block to the next; ``block_len`` by default.

    The others are as in `Region` and `CacheLayout`. Build those yourself where regions differ.

    Raises:
        LayoutError: a number is out of range, or regions overlap.
    """
    named: list[tuple[tuple[str, ...], int]]
    if isinstance(bases, Mapping):
        named = [((name,), bases[name]) for name in sorted(bases, key=natural_key)]
    else:
        named = [((), base) for base in bases]
    regions = tuple(
        Region(
            base=base,
            block_len=block_len,
            block_stride=block_len if block_stride is None else block_stride,
            num_blocks=num_blocks,
            num_kv_heads=num_kv_heads,
            replicated=replicated,
            planes=planes,
            mem_type=mem_type,
            device_id=device_id,
            layers=layers,
        )
        for layers, base in named
    )
    _refuse_overlap(regions)
    return CacheLayout(
        regions=regions,
        groups=(CacheGroup(block_size),),
        kv_layout=kv_layout,
        kernel_blocks_per_block=kernel_blocks_per_block,
        attn_backend=attn_backend,
        token_granular=token_granular,
        packing=packing,
        memory=_joined(
            MemoryRange(r.base, r.end - r.base, r.mem_type, r.device_id) for r in regions
        ),
    )


def layout_from_tensors(
    caches: Mapping[str, object],
    *,
    num_kv_heads: int,
    dims: str | Mapping[str, str] = "BHNC",
    tp_size: int = 1,
    block_size: int | None = None,
    num_blocks: int | None = None,
    page_sizes: Mapping[str, int] | None = None,
    replicated: Collection[str] = (),
    groups: Mapping[str, int] | None = None,
    sliding_windows: Sequence[int] = (0,),
    kv_layout: str | None = None,
    kernel_blocks_per_block: int = 1,
    attn_backend: str = "",
    token_granular: bool = True,
    packing: str = "",
    pack_layers: bool = True,
) -> CacheLayout:
    """The layout of an engine's cache tensors.

    Args:
        caches: layer name -> its cache: a torch tensor, a NumPy array, anything with the buffer
            protocol, or a sequence of them (K and V apart). The order does not matter.
        num_kv_heads: KV heads of the whole model, over all ranks.
        dims: a letter for each axis, for all layers or by layer name: ``B`` blocks, ``H`` heads,
            ``N`` tokens, ``C`` content (may occur twice), ``2`` K and V, ``L`` layers. What is
            outermost in memory is read from the strides, not from the order of the axes.
            ``"BHNC"`` is vLLM's tensor, ``"2BNHC"`` K and V as two segments, ``"B2HNC"`` K and then
            V in one block, ``"BNC"`` an MLA cache. ``"*"``: contiguous memory of any shape, cut
            into ``page_sizes``.
        tp_size: tensor-parallel size of this engine; the tensors' heads are checked against it.
        block_size: tokens of a kernel block; needed where no axis is ``N``.
        num_blocks: kernel blocks to describe where the tensors have more (or are ``"*"``).
        page_sizes: bytes of a layer's kernel block: needed for ``"*"``, checked for others.
        replicated: names of the layers whose cache is the same on every rank (MLA).
        groups: layer name -> cache group; all in group 0 by default.
        sliding_windows: window in tokens of each cache group, 0 for full attention.
        kv_layout: name of the layout; must agree with the strides. By default ``"HND"`` or
            ``"NHD"``, as the strides say.
        token_granular: False if the backend packs tokens inside (block, head). It is also set to
            False where the strides say so.
        pack_layers: make layers that follow each other inside each block one region with packed
            members, so that a block of all of them is one descriptor.

    The others are as in `CacheLayout`. Layers of one group that share a whole buffer become one
    region; so do layers of different groups whose blocks are alike.

    Raises:
        LayoutError: a cache cannot be cut into equal blocks (the message has layer, shape and
            strides), layers overlap, or the arguments contradict the tensors.
    """
    if not caches:
        raise LayoutError("no cache tensors were given")
    groups = {} if groups is None else groups
    if isinstance(dims, str):
        dims = dict.fromkeys(caches, dims)
    _refuse_unknown_layers(caches, replicated=replicated, groups=groups, page_sizes=page_sizes)
    missing = [layer for layer in caches if layer not in dims]
    if missing:
        raise LayoutError(f"dims does not say what the axes of layer {missing[0]!r} are")
    for layer, group in groups.items():
        if not 0 <= group < len(sliding_windows):
            raise LayoutError(
                f"layer {layer!r}: cache group {group} does not exist; sliding_windows has "
                f"{len(sliding_windows)} groups"
            )
    cuts: list[_Cut] = []
    regions: list[Region] = []
    memory: list[MemoryRange] = []
    for layer in sorted(caches, key=natural_key):
        page_size = None if page_sizes is None else page_sizes.get(layer)
        for cache in _parts(caches[layer]):
            view = _view(layer, cache)
            cut = _cut(view, dims[layer], num_blocks, page_size)
            cuts.append(cut)
            memory.append(view.storage)
            regions.extend(
                Region(
                    base=base,
                    block_len=cut.block_len,
                    block_stride=cut.block_stride,
                    num_blocks=cut.num_blocks,
                    num_kv_heads=num_kv_heads,
                    replicated=layer in replicated,
                    planes=cut.planes,
                    mem_type=view.storage.mem_type,
                    device_id=view.storage.device_id,
                    groups=(groups.get(layer, 0),),
                    layers=(layer,),
                )
                for base in cut.bases
            )
            if layer not in replicated:
                _check_heads(cut, num_kv_heads, tp_size)
    cache_groups = tuple(
        CacheGroup(_group_block_size(number, cuts, groups, block_size), window)
        for number, window in enumerate(sliding_windows)
    )
    regions = _share(regions)
    _refuse_overlap(regions)
    if pack_layers:
        regions = _pack(regions)
    return CacheLayout(
        regions=tuple(regions),
        groups=cache_groups,
        kv_layout=_agreed_kv_layout(cuts, kv_layout),
        kernel_blocks_per_block=kernel_blocks_per_block,
        attn_backend=attn_backend,
        token_granular=token_granular and all(cut.token_granular for cut in cuts),
        packing=packing,
        memory=_joined(memory),
    )


class RegionMetadata(Protocol):
    """The fields of ``NixlAgentMetadata`` that describe memory."""

    @property
    def engine_id(self) -> str: ...
    @property
    def kv_caches_base_addr(self) -> list[int]: ...
    @property
    def device_id(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_lens(self) -> list[int]: ...
    @property
    def block_strides(self) -> list[int]: ...
    @property
    def kv_cache_layout(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def ssm_sizes(self) -> tuple[int, int]: ...
    @property
    def attn_backend_name(self) -> str: ...
    @property
    def physical_blocks_per_logical_kv_block(self) -> int: ...
    @property
    def region_num_blocks(self) -> list[int] | None: ...
    @property
    def region_group_ids(self) -> list[int] | None: ...
    @property
    def region_names(self) -> list[str] | None: ...
    @property
    def region_mem_types(self) -> list[str] | None: ...
    @property
    def region_members(self) -> list[list[str]]: ...
    @property
    def packed_member_layouts(self) -> dict[str, tuple[int, int]]: ...


def layout_from_metadata(
    metadata: RegionMetadata, reference: CacheLayout, *, packing: str = ""
) -> CacheLayout:
    """A peer's layout, from what it sent in the handshake.

    What the metadata does not say (heads, planes, windows, whether a region is replicated) is taken
    from the layer of the same name, or the same position, of our own layout: the compatibility
    check of the handshake has shown that both run the same model.

    Args:
        metadata: anything with the memory fields of ``NixlAgentMetadata``.
        reference: our own layout.
        packing: the peer's `CacheLayout.packing` if it said so; ours otherwise.

    Raises:
        LayoutError: the fields contradict each other or hold other layers than ours.
    """
    count = len(metadata.kv_caches_base_addr)
    if count < 1:
        raise LayoutError(f"engine {metadata.engine_id!r} exports no KV cache regions")
    if any(metadata.ssm_sizes):
        raise LayoutError(
            f"engine {metadata.engine_id!r} exports state-space states of "
            f"{tuple(metadata.ssm_sizes)} bytes; only attention caches are supported"
        )
    names = metadata.region_names or None
    members = metadata.region_members or [[name] for name in names or ()] or [[]] * count
    mem_types = metadata.region_mem_types or [reference.regions[0].mem_type] * count
    num_blocks = metadata.region_num_blocks or [metadata.num_blocks] * count
    group_ids = metadata.region_group_ids
    if not group_ids:
        own = [_group_id(region) for region in reference.regions]
        group_ids = own if len(own) == count else [0] * count
    for field_name, values in (
        ("block_lens", metadata.block_lens),
        ("block_strides", metadata.block_strides),
        ("region_num_blocks", num_blocks),
        ("region_group_ids", group_ids),
        ("region_names", names or [""] * count),
        ("region_mem_types", mem_types),
        ("region_members", members),
    ):
        if len(values) != count:
            raise LayoutError(
                f"engine {metadata.engine_id!r}: {field_name} has {len(values)} entries for "
                f"{count} regions"
            )
    highest = max(group_ids)
    if highest >= max(count, len(reference.groups)) or min(group_ids) < SHARED_GROUP:
        raise LayoutError(
            f"engine {metadata.engine_id!r}: region_group_ids {group_ids!r:.200} with {count} "
            "regions"
        )
    # A shared region says neither which groups share it nor how many there are: as on our side.
    if SHARED_GROUP in group_ids:
        highest = max(highest, len(reference.groups) - 1)
    twin_of = _Twins(reference, metadata.engine_id, count)
    regions = []
    for i in range(count):
        layers = tuple(members[i]) or ((names[i],) if names and names[i] else ())
        twin = twin_of(i, layers)
        packed = tuple(
            PackedMember(layer, offset, length, twin_of(i, (layer,)).planes)
            for offset, length, layer in sorted(
                (*metadata.packed_member_layouts[layer], layer)
                for layer in layers
                if layer in metadata.packed_member_layouts
            )
        )
        regions.append(
            Region(
                base=metadata.kv_caches_base_addr[i],
                block_len=metadata.block_lens[i],
                block_stride=metadata.block_strides[i],
                num_blocks=num_blocks[i],
                num_kv_heads=twin.region.num_kv_heads,
                replicated=twin.region.replicated,
                planes=1 if packed else twin.planes,
                mem_type=cast(MemType, mem_types[i]),
                device_id=0 if mem_types[i] == "DRAM" else metadata.device_id,
                groups=(group_ids[i],)
                if group_ids[i] != SHARED_GROUP
                else _shared_groups(twin.region, highest),
                layers=layers,
                packed=packed,
            )
        )
    return CacheLayout(
        regions=tuple(regions),
        groups=_peer_groups(metadata, regions, highest + 1, twin_of),
        kv_layout=metadata.kv_cache_layout,
        kernel_blocks_per_block=metadata.physical_blocks_per_logical_kv_block,
        attn_backend=metadata.attn_backend_name,
        token_granular=reference.token_granular,
        packing=packing or reference.packing,
    )


@dataclass(frozen=True, slots=True)
class _Twin:
    """What our own layout knows of a peer's region."""

    region: Region
    planes: int


class _Twins:
    """Finds the region of our own layout that holds the same layers as a peer's."""

    def __init__(self, reference: CacheLayout, engine_id: str, count: int) -> None:
        self.reference = reference
        self._engine_id = engine_id
        self._count = count
        self._by_layer: dict[str, _Twin] = {}
        for region in reference.regions:
            for layer in region.layers:
                self._by_layer.setdefault(layer, _Twin(region, region.planes))
            for member in region.packed:
                self._by_layer[member.layer] = _Twin(region, member.planes)

    def __call__(self, position: int, layers: tuple[str, ...]) -> _Twin:
        regions = self.reference.regions
        if layers and self._by_layer:
            twin = self._by_layer.get(layers[0])
            if twin is None:
                raise LayoutError(
                    f"engine {self._engine_id!r} exports layer {layers[0]!r}, which this engine "
                    f"does not have (ours begin with {regions[0].name!r}); both must run the same "
                    "model"
                )
            return twin
        if len(regions) != self._count:
            raise LayoutError(
                f"engine {self._engine_id!r} exports {self._count} KV cache regions without layer "
                f"names, this engine has {len(regions)}; both must run the same model"
            )
        return _Twin(regions[position], regions[position].planes)


def _shared_groups(twin: Region, highest: int) -> tuple[int, ...]:
    return twin.groups if len(twin.groups) > 1 else tuple(range(highest + 1))


def _peer_groups(
    metadata: RegionMetadata, regions: Sequence[Region], count: int, twin_of: _Twins
) -> tuple[CacheGroup, ...]:
    """The peer's cache groups: windows as ours, block sizes in the ratio of the first groups'."""
    reference = twin_of.reference
    # Groups that only share regions are taken to be numbered as ours.
    twins = [reference.groups[i if i < len(reference.groups) else 0] for i in range(count)]
    for i, region in enumerate(regions):
        own = twin_of(i, region.layers).region
        if len(region.groups) == len(own.groups) == 1:
            twins[region.groups[0]] = reference.groups[own.groups[0]]
    groups = []
    for twin in twins:
        tokens, rest = divmod(twin.block_size * metadata.block_size, reference.block_size)
        if rest:
            raise LayoutError(
                f"engine {metadata.engine_id!r} has blocks of {metadata.block_size} tokens, this "
                f"engine of {reference.block_size}: a cache group of {twin.block_size} tokens per "
                "block has no counterpart; use the same block size on both sides"
            )
        groups.append(CacheGroup(tokens, twin.sliding_window))
    return tuple(groups)


# --- cutting a tensor into blocks ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _View:
    """A cache tensor: strides in bytes, and the memory that it is a view of."""

    layer: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    storage: MemoryRange

    def refuse(self, reason: str) -> LayoutError:
        return LayoutError(
            f"the cache of layer {self.layer!r} cannot be cut into equal blocks: {reason} "
            f"(shape {self.shape}, strides {self.strides} bytes)"
        )


@dataclass(frozen=True, slots=True)
class _Cut:
    """A cache tensor as blocks. ``heads`` and ``tokens`` are 0 and ``head_major`` None where the
    tensor does not tell."""

    view: _View
    bases: tuple[int, ...]
    block_len: int
    block_stride: int
    num_blocks: int
    planes: int
    heads: int = 0
    tokens: int = 0
    head_major: bool | None = None
    token_granular: bool = True


@dataclass(frozen=True, slots=True)
class _Axis:
    letter: str
    size: int
    stride: int


def _parts(cache: object) -> Sequence[object]:
    return cache if isinstance(cache, list | tuple) else (cache,)


def _view(layer: str, cache: object) -> _View:
    if hasattr(cache, "data_ptr"):
        return _torch_view(layer, cache)
    try:
        array = np.asarray(cache if hasattr(cache, "__array_interface__") else memoryview(cache))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise LayoutError(
            f"the cache of layer {layer!r} is a {type(cache).__name__}, which has neither "
            f"data_ptr() nor __array_interface__ nor the buffer protocol ({error})"
        ) from None
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    spans = [(size - 1) * stride for size, stride in zip(root.shape, root.strides, strict=True)]
    low = root.ctypes.data + sum(span for span in spans if span < 0)
    length = sum(abs(span) for span in spans) + root.itemsize
    return _View(
        layer,
        array.ctypes.data,
        array.shape,
        array.strides,
        array.itemsize,
        MemoryRange(low, length, "DRAM", 0),
    )


def _torch_view(layer: str, tensor: Any) -> _View:
    itemsize = tensor.element_size()
    storage = tensor.untyped_storage()
    kind = tensor.device.type
    if kind == "meta" or storage.data_ptr() == 0:
        raise LayoutError(f"the cache of layer {layer!r} has no memory (device {tensor.device})")
    mem_type: MemType = "DRAM" if kind == "cpu" else "VRAM"
    device_id = 0 if kind == "cpu" else (tensor.device.index or 0)
    return _View(
        layer,
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple(stride * itemsize for stride in tensor.stride()),
        itemsize,
        MemoryRange(storage.data_ptr(), storage.nbytes(), mem_type, device_id),
    )


def _cut(view: _View, dims: str, num_blocks: int | None, page_size: int | None) -> _Cut:
    if 0 in view.shape:
        raise view.refuse("it is empty")
    if dims == "*":
        return _cut_flat(view, num_blocks, page_size)
    if len(dims) != len(view.shape) or dims.count("B") != 1 or not set(dims) <= set("BHNC2L"):
        raise view.refuse(
            f"dims {dims!r} must name its {len(view.shape)} axes with the letters B, H, N, C, 2, "
            "L, and exactly one of them B"
        )
    if dims.count("H") > 1 or dims.count("N") > 1:
        raise view.refuse(f"dims {dims!r} names several axes of heads or of tokens")
    axes = [
        _Axis(letter, size, stride)
        for letter, size, stride in zip(dims, view.shape, view.strides, strict=True)
    ]
    if any(axis.stride <= 0 and axis.size > 1 for axis in axes):
        raise view.refuse("an axis runs backwards or repeats itself")
    blocks = axes[dims.index("B")]
    # Axes of length 1 are left out: their strides say nothing.
    others = sorted(
        (axis for axis in axes if axis is not blocks and axis.size > 1),
        key=lambda axis: axis.stride,
        reverse=True,
    )
    outer = [axis for axis in others if _is_around(axis, blocks)]
    inner = [axis for axis in others if not _is_around(axis, blocks)]
    block_len = view.itemsize
    for axis in reversed(inner):
        if axis.stride != block_len:
            raise view.refuse(
                f"axis {axis.letter!r} steps {axis.stride} bytes over pieces of {block_len} bytes, "
                "so a block is not contiguous"
            )
        block_len *= axis.size
    block_stride = max(blocks.stride, block_len) if blocks.size == 1 else blocks.stride
    if block_stride < block_len:
        raise view.refuse(
            f"blocks of {block_len} bytes stand only {block_stride} bytes apart, so they overlap"
        )
    for axis in outer:
        if axis.letter not in "2L":
            raise view.refuse(
                f"axis {axis.letter!r} ({axis.size} steps of {axis.stride} bytes) stands around "
                "the blocks; only K/V planes and layers may"
            )
    if page_size is not None and page_size != block_len:
        raise view.refuse(f"a block has {block_len} bytes where {page_size} were expected")
    if num_blocks is not None and num_blocks > blocks.size:
        raise view.refuse(f"it has {blocks.size} blocks where {num_blocks} were expected")
    sizes = dict(zip(dims, view.shape, strict=True))
    order = "".join(axis.letter for axis in inner)
    content = order.lstrip("2L")
    if "H" in content and content[0] not in "HN":
        raise view.refuse(
            f"axis {content[0]!r} stands around the heads, so a head is not contiguous in a block"
        )
    return _Cut(
        view,
        tuple(
            view.address + sum(i * axis.stride for i, axis in zip(index, outer, strict=True))
            for index in itertools.product(*(range(axis.size) for axis in outer))
        ),
        block_len,
        block_stride,
        blocks.size if num_blocks is None else num_blocks,
        planes=math.prod(axis.size for axis in inner[: len(order) - len(content)]),
        heads=sizes.get("H", 0),
        tokens=sizes.get("N", 0),
        head_major=content[0] == "H" if "H" in content and "N" in content else None,
        token_granular=_is_token_granular(content, sizes.get("N", 0)),
    )


def _is_around(axis: _Axis, blocks: _Axis) -> bool:
    """Whether ``axis`` steps over whole runs of blocks, not over parts of one block."""
    # The stride of a single block says little, but K/V planes and layers may still be around it.
    return axis.stride >= blocks.stride and (blocks.size > 1 or axis.letter in "2L")


def _is_token_granular(content: str, tokens: int) -> bool:
    """``content``: letters inside a plane, outermost first. A block can be cut between tokens if
    nothing but the heads stands around them."""
    if tokens <= 1:
        return tokens == 1
    return content[: content.index("N")] in ("", "H")


def _cut_flat(view: _View, num_blocks: int | None, page_size: int | None) -> _Cut:
    if page_size is None or page_size < 1:
        raise view.refuse(f"page_sizes has no bytes per block for {view.layer!r} (dims '*')")
    length = view.itemsize
    for size, stride in sorted(
        zip(view.shape, view.strides, strict=True), key=operator.itemgetter(1)
    ):
        if size > 1 and stride != length:
            raise view.refuse("dims '*' needs contiguous memory")
        length *= size
    whole, tail = divmod(length, page_size)
    if num_blocks is None:
        num_blocks = whole
    # A tail shorter than a block is padding of the allocation.
    if num_blocks != whole or num_blocks < 1:
        raise view.refuse(
            f"{length} bytes are {whole} blocks of {page_size} bytes and {tail} bytes, "
            f"not {num_blocks} blocks"
        )
    return _Cut(view, (view.address,), page_size, page_size, num_blocks, 1)


def _check_heads(cut: _Cut, num_kv_heads: int, tp_size: int) -> None:
    expected = max(1, num_kv_heads // tp_size)
    if cut.heads and cut.heads != expected:
        raise LayoutError(
            f"the cache of layer {cut.view.layer!r} has {cut.heads} heads where {num_kv_heads} KV "
            f"heads over {tp_size} ranks leave {expected} (shape {cut.view.shape}); check "
            "num_kv_heads, tp_size and dims"
        )


def _group_block_size(
    number: int, cuts: Sequence[_Cut], groups: Mapping[str, int], block_size: int | None
) -> int:
    sizes = {c.tokens for c in cuts if c.tokens and groups.get(c.view.layer, 0) == number}
    if len(sizes) > 1:
        raise LayoutError(f"cache group {number} has blocks of {sorted(sizes)} tokens")
    if not sizes:
        if block_size is None:
            raise LayoutError(
                f"no tensor of cache group {number} has an axis of tokens; pass block_size"
            )
        return block_size
    (size,) = sizes
    if block_size is not None and number == 0 and size != block_size:
        raise LayoutError(f"block_size is {block_size}, but the tensors have {size} tokens a block")
    return size


def _agreed_kv_layout(cuts: Sequence[_Cut], kv_layout: str | None) -> str:
    found = {cut.head_major for cut in cuts if cut.head_major is not None}
    if len(found) > 1:
        heads, tokens = (
            next(cut.view.layer for cut in cuts if cut.head_major is major)
            for major in (True, False)
        )
        raise LayoutError(
            f"layer {heads!r} has the heads outside the tokens (HND), layer {tokens!r} inside (NHD)"
        )
    seen = found.pop() if found else None
    if kv_layout is None:
        return "NHD" if seen is False else "HND"
    if seen is not None and is_head_major(kv_layout) != seen:
        raise LayoutError(
            f"kv_layout is {kv_layout!r}, but the strides of layer {cuts[0].view.layer!r} say "
            f"{'HND' if seen else 'NHD'} (shape {cuts[0].view.shape}, strides "
            f"{cuts[0].view.strides} bytes)"
        )
    return kv_layout


def _refuse_unknown_layers(
    caches: Mapping[str, object],
    *,
    replicated: Collection[str],
    groups: Mapping[str, int],
    page_sizes: Mapping[str, int] | None,
) -> None:
    for argument, names in (
        ("replicated", replicated),
        ("groups", groups),
        ("page_sizes", page_sizes or ()),
    ):
        unknown = sorted(set(names) - set(caches), key=natural_key)
        if unknown:
            raise LayoutError(f"{argument} names layer {unknown[0]!r}, which has no cache tensor")


# --- regions of several layers ------------------------------------------------------------------


def _share(regions: Iterable[Region]) -> list[Region]:
    """Joins regions that are the same memory."""
    shared: dict[tuple[object, ...], Region] = {}
    for region in regions:
        key = (*region.row, region.mem_type, region.planes, region.replicated)
        known = shared.get(key)
        if known is None:
            shared[key] = region
        else:
            groups = tuple(sorted({*known.groups, *region.groups}))
            shared[key] = replace(known, layers=known.layers + region.layers, groups=groups)
    return list(shared.values())


def _refuse_overlap(regions: Iterable[Region]) -> None:
    """Two regions with the same bytes would be written twice by one transfer. Only regions of
    different cache groups, whose blocks are never in use at once, may overlap."""
    active: list[Region] = []
    for region in sorted(regions, key=lambda r: (r.mem_type, r.device_id, r.base)):
        active = [
            other
            for other in active
            if (other.mem_type, other.device_id) == (region.mem_type, region.device_id)
            and other.end > region.base
        ]
        for other in active:
            if set(other.groups) & set(region.groups) and not _interleave(other, region):
                raise LayoutError(
                    f"{other} ({other.base:#x}, {other.num_blocks} x {other.block_len} bytes, "
                    f"stride {other.block_stride}) and {region} ({region.base:#x}, "
                    f"{region.num_blocks} x {region.block_len} bytes, stride "
                    f"{region.block_stride}) overlap"
                )
        active.append(region)


def _interleave(first: Region, second: Region) -> bool:
    """Whether two regions, ``first`` beginning no later, share no byte although they overlap."""
    if first.block_stride != second.block_stride:
        return False
    offset = (second.base - first.base) % first.block_stride
    return offset >= first.block_len and offset + second.block_len <= first.block_stride


def _pack(regions: Sequence[Region]) -> list[Region]:
    """Joins regions that follow each other inside each block of one buffer. The order stays: by
    name, and among regions of one name (K and V) as given, whatever their addresses are."""
    times = Counter(region.name for region in regions)
    packed: list[tuple[int, Region]] = []
    for position, region in sorted(
        enumerate(regions),
        key=lambda item: (item[1].mem_type, item[1].device_id, item[1].groups, item[1].base),
    ):
        first, last = packed[-1] if packed else (position, None)
        # A layer's page in a row is found by its name, so K and V of their own stay apart.
        alone = times[region.name] == 1 and (last is None or times[last.name] == 1)
        if last is not None and alone and _follows_in_each_block(last, region):
            members = last.packed or (PackedMember(last.name, 0, last.block_len, last.planes),)
            member = PackedMember(region.name, last.block_len, region.block_len, region.planes)
            joined = replace(
                last,
                block_len=last.block_len + region.block_len,
                planes=1,
                layers=last.layers + region.layers,
                packed=(*members, member),
            )
            packed[-1] = (first, joined)
        else:
            packed.append((position, region))
    packed.sort(key=lambda item: (natural_key(item[1].name), item[0]))
    return [region for _, region in packed]


def _follows_in_each_block(first: Region, second: Region) -> bool:
    return (
        first.num_blocks == second.num_blocks
        # A single block shows nothing: the neighbour may be another allocation.
        and first.num_blocks > 1
        and first.block_stride == second.block_stride
        and first.base + first.block_len == second.base
        and (first.mem_type, first.device_id) == (second.mem_type, second.device_id)
        and first.groups == second.groups
        and (first.num_kv_heads, first.replicated) == (second.num_kv_heads, second.replicated)
        and len(first.layers) == max(1, len(first.packed))  # not shared by several layers
        and len(second.layers) == 1
    )


def _joined(ranges: Iterable[MemoryRange]) -> tuple[MemoryRange, ...]:
    """The ranges without overlaps. Ranges that only touch stay apart: they are different
    allocations, which NIXL backends may be unable to register as one."""

    def key(memory: MemoryRange) -> tuple[str, int, int]:
        return (memory.mem_type, memory.device_id, memory.base)

    joined: list[MemoryRange] = []
    for memory in sorted(ranges, key=key):
        last = joined[-1] if joined else None
        if last is not None and key(last)[:2] == key(memory)[:2] and memory.base < last.end:
            joined[-1] = replace(last, length=max(last.end, memory.end) - last.base)
        else:
            joined.append(memory)
    return tuple(joined)


def pages(layout: CacheLayout) -> Iterator[tuple[str, Region]]:
    """The layers' pages of a layout: ``(layer name or "", the page as a region)``. A region with
    packed members gives one for each member."""
    for region in layout.regions:
        if not region.packed:
            yield region.name, region
            continue
        for member in region.packed:
            yield (
                member.layer,
                replace(
                    region,
                    base=region.base + member.offset,
                    block_len=member.length,
                    planes=member.planes,
                    layers=(member.layer,),
                    packed=(),
                ),
            )
