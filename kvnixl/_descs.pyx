# cython: auto_pickle=False, autotestdict=False
"""Descriptor tables, descriptor ids and runs: what turns block ids into the arguments of a NIXL
transfer.

A *region* is ``(base, block_len, stride, count, device)``: ``count`` blocks of ``block_len`` bytes,
``stride`` bytes apart, from address ``base`` on. Every number is an unsigned 64-bit integer. A
prepared list numbers the blocks of all its regions from 0 on, region by region; these numbers are
the *descriptor ids* that NIXL takes as int32.

Integer sequences may be lists, tuples, ranges or other sequences of integers, NumPy arrays of any
integer dtype, or other buffers of integers. Each is copied into int32 while every value is checked;
that check is what allows the loops over the copies to run unchecked. The loops keep the GIL: they
take microseconds, less than it may take to get the GIL back.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_RECORDS_RO,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from libc.stdint cimport (
    INT32_MAX,
    UINT64_MAX,
    int8_t,
    int16_t,
    int32_t,
    int64_t,
    uint8_t,
    uint16_t,
    uint32_t,
    uint64_t,
)
from libc.string cimport memcpy

import operator
from collections.abc import Sequence

import numpy as np

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int* overflow) except? -1
    PyObject* PySequence_Fast_GET_ITEM(object sequence, Py_ssize_t i)

cdef extern from "kvnixl_descs.h" nogil:
    ctypedef struct kvnixl_run_t:
        pass
    Py_ssize_t kvnixl_count_runs(const int32_t* dst, const int32_t* src, Py_ssize_t n)
    bint kvnixl_is_ascending(const int32_t* values, Py_ssize_t n)
    void kvnixl_find_runs(
        const int32_t* dst, const int32_t* src, Py_ssize_t n, kvnixl_run_t* runs
    )
    kvnixl_run_t* kvnixl_sort_runs(
        kvnixl_run_t* runs, kvnixl_run_t* scratch, Py_ssize_t num_runs
    )
    Py_ssize_t kvnixl_join_runs(kvnixl_run_t* runs, Py_ssize_t num_runs, int32_t* duplicate)
    void kvnixl_write_runs(
        const kvnixl_run_t* runs, Py_ssize_t num_runs, int32_t* dst, int32_t* src
    )

# Columns of a region, and their names in messages.
cdef enum:
    BASE = 0
    BLOCK_LEN = 1
    STRIDE = 2
    COUNT = 3
    DEVICE = 4
    NUM_FIELDS = 5

cdef object FIELD_NAMES = ("base", "block_len", "stride", "count", "device")

# NIXL counts and indexes descriptors with int32.
cdef int64_t INDEX_LIMIT = <int64_t>INT32_MAX + 1

cdef object INT32 = np.dtype(np.int32)
cdef object UINT64 = np.dtype(np.uint64)

ctypedef fused buffer_int:
    int8_t
    int16_t
    int32_t
    int64_t
    uint8_t
    uint16_t
    uint32_t
    uint64_t


# --- integer sequences --------------------------------------------------------------------------


@cython.final
@cython.internal
cdef class Ids:
    """A checked int32 copy of a caller's integer sequence."""

    cdef int32_t* data
    cdef Py_ssize_t size

    def __cinit__(self, Py_ssize_t size):
        self.data = <int32_t*>PyMem_Malloc(max(size, 1) * sizeof(int32_t))
        if self.data == NULL:
            raise MemoryError()
        self.size = size

    def __dealloc__(self):
        PyMem_Free(self.data)


@cython.final
@cython.internal
cdef class Name:
    """Names one integer sequence in messages; made before each call, spelt out only on an error."""

    cdef str what
    cdef Py_ssize_t group  # -1: no cache group's

    def __cinit__(self, str what, Py_ssize_t group=-1):
        self.what = what
        self.group = group

    def __str__(self):
        return self.what if self.group < 0 else f"{self.what} of group {self.group}"


cdef object out_of_range(Name name, object value, object position, int64_t limit):
    message = f"{name}: {value} at position {position} is outside 0 .. {limit - 1}"
    if name.group >= 0:
        message += f"; the smallest region of the group has {limit} blocks"
    return IndexError(message)


cdef Py_ssize_t check_size(Name name, Py_ssize_t size) except -1:
    if size >= INDEX_LIMIT:
        raise ValueError(f"{name}: {size} integers are too many; NIXL takes at most 2**31 - 1")
    return size


cdef Py_ssize_t copy_ids(
    const buffer_int* values, Py_ssize_t stride, Py_ssize_t size, uint64_t limit, int32_t* out
) noexcept nogil:
    """Copies up to the first value outside 0 .. limit - 1; returns how many were copied."""
    cdef const char* source = <const char*>values
    cdef buffer_int value
    cdef Py_ssize_t i
    for i in range(size):
        memcpy(&value, source + i * stride, sizeof(value))  # the address may be unaligned
        if <uint64_t>value >= limit:  # a negative value becomes a huge one
            return i
        out[i] = <int32_t>value
    return size


cdef Py_ssize_t copy_view(Py_buffer* view, bint is_signed, int64_t limit, int32_t* out) noexcept:
    cdef Py_ssize_t stride = view.strides[0]
    cdef Py_ssize_t size = view.shape[0]
    if view.itemsize == 1:
        if is_signed:
            return copy_ids(<const int8_t*>view.buf, stride, size, limit, out)
        return copy_ids(<const uint8_t*>view.buf, stride, size, limit, out)
    if view.itemsize == 2:
        if is_signed:
            return copy_ids(<const int16_t*>view.buf, stride, size, limit, out)
        return copy_ids(<const uint16_t*>view.buf, stride, size, limit, out)
    if view.itemsize == 4:
        if is_signed:
            return copy_ids(<const int32_t*>view.buf, stride, size, limit, out)
        return copy_ids(<const uint32_t*>view.buf, stride, size, limit, out)
    if is_signed:
        return copy_ids(<const int64_t*>view.buf, stride, size, limit, out)
    return copy_ids(<const uint64_t*>view.buf, stride, size, limit, out)


cdef Ids ids_from_buffer(object values, Name name, int64_t limit):
    cdef Py_buffer view
    cdef bytes code
    cdef bint is_signed
    cdef Py_ssize_t copied
    cdef Ids ids
    try:
        PyObject_GetBuffer(values, &view, PyBUF_RECORDS_RO)
    except (BufferError, ValueError) as error:
        raise ValueError(f"{name} cannot be read as integers: {error}") from error
    try:
        if view.ndim != 1:
            raise ValueError(f"{name} must have one dimension, not {view.ndim}")
        code = b"B" if view.format == NULL else view.format
        if code[:1] in (b"<", b">", b"!"):
            array = np.asarray(values)
            return ids_from_buffer(array.astype(array.dtype.newbyteorder("=")), name, limit)
        code = code.lstrip(b"@=")
        is_signed = code in (b"b", b"h", b"i", b"l", b"q", b"n")
        is_unsigned = code in (b"B", b"H", b"I", b"L", b"Q", b"N")
        if not (is_signed or is_unsigned) or view.itemsize not in (1, 2, 4, 8):
            kind = getattr(values, "dtype", f"buffer format {code!r}")
            raise ValueError(f"{name} must be integers, not {kind}")
        ids = Ids(check_size(name, view.shape[0]))
        copied = copy_view(&view, is_signed, limit, ids.data)
        if copied < ids.size:
            value = int(np.asarray(values)[copied])
            raise out_of_range(name, value, copied, limit)
        return ids
    finally:
        PyBuffer_Release(&view)


cdef object int_or_none(object value):
    """``value`` as an ``int``; ``None`` if it is no integer (a bool is none)."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


cdef Ids ids_from_items(object items, Name name, int64_t limit):
    """From a list or a tuple."""
    cdef Py_ssize_t size = check_size(name, len(items))
    cdef Ids ids = Ids(size)
    cdef Py_ssize_t i
    cdef long long value
    cdef int overflow = 0
    for i in range(size):
        item = <object>PySequence_Fast_GET_ITEM(items, i)
        if type(item) is not int:
            if type(items) is not tuple:
                # __index__ may run any code, also code that shortens the list.
                return ids_from_items(tuple(items), name, limit)
            integer = int_or_none(item)
            if integer is None:
                raise ValueError(f"{name}: {item!r} at position {i} is not an integer")
            item = integer
        value = PyLong_AsLongLongAndOverflow(item, &overflow)  # -1 on overflow
        if not 0 <= value < limit:
            raise out_of_range(name, item, i, limit)
        ids.data[i] = <int32_t>value
    return ids


cdef Ids ids_from(object values, Name name, int64_t limit):
    """A copy of ``values``, all of them in 0 .. limit - 1."""
    if type(values) is list or type(values) is tuple:
        return ids_from_items(values, name, limit)
    if isinstance(values, (bytes, bytearray)):
        raise ValueError(f"{name}: bytes have no integer type; pass np.frombuffer(..., dtype=...)")
    if PyObject_CheckBuffer(values):
        return ids_from_buffer(values, name, limit)
    if hasattr(values, "__array__"):
        try:
            array = np.asarray(values)
        except Exception as error:
            raise ValueError(f"{name} cannot be read as integers: {error}") from error
        return ids_from_buffer(array, name, limit)
    if isinstance(values, range) and values:
        # Before it becomes a tuple: this also bounds its length.
        for value in (next(iter(values)), next(reversed(values))):
            if not 0 <= value < limit:
                raise out_of_range(name, value, values.index(value), limit)
    if isinstance(values, Sequence) and not isinstance(values, str):
        return ids_from_items(tuple(values), name, limit)
    raise TypeError(f"{name} must be a sequence of integers, not {type(values).__name__}")


# --- regions ------------------------------------------------------------------------------------


cdef object table_from_array(object regions):
    if regions.ndim != 2 or regions.shape[1] != NUM_FIELDS:
        raise ValueError(f"regions must have the shape (R, 5), not {regions.shape}")
    if regions.dtype.kind not in "iu":
        raise ValueError(f"regions must be integers, not {regions.dtype}")
    if regions.dtype.kind == "i" and regions.size > 0 and regions.min() < 0:
        r, field = (int(i) for i in np.argwhere(regions < 0)[0])
        raise ValueError(f"region {r}: {FIELD_NAMES[field]} {regions[r, field]} is negative")
    return np.array(regions, dtype=UINT64, order="C")


cdef object table_from_rows(object regions):
    cdef uint64_t[:, ::1] table
    cdef tuple rows = tuple(regions)
    cdef Py_ssize_t r, field
    array = np.empty((len(rows), NUM_FIELDS), UINT64)
    table = array
    for r in range(len(rows)):
        try:
            fields = tuple(rows[r])
        except TypeError:
            raise ValueError(f"region {r} is {rows[r]!r}, not {FIELD_NAMES}") from None
        if len(fields) != NUM_FIELDS:
            raise ValueError(f"region {r} has {len(fields)} fields, not 5: {FIELD_NAMES}")
        for field in range(NUM_FIELDS):
            value = fields[field]
            integer = value if type(value) is int else int_or_none(value)
            if integer is None:
                raise ValueError(f"region {r}: {FIELD_NAMES[field]} {value!r} is not an integer")
            try:
                table[r, field] = integer
            except OverflowError:
                raise ValueError(
                    f"region {r}: {FIELD_NAMES[field]} {integer} is outside 0 .. 2**64 - 1"
                ) from None
    return array


cdef object region_table(object regions):
    """``regions`` as a new (R, 5) uint64 array, proven to lie below 2**64 and to have blocks that
    int32 can number. The stride of a region of one block, which nothing uses, becomes its block
    length: NIXL refuses a smaller one."""
    cdef uint64_t[:, ::1] table
    cdef uint64_t block_len, stride, count, room
    cdef uint64_t num_descs = 0
    cdef Py_ssize_t r
    if PyObject_CheckBuffer(regions):
        array = table_from_array(np.asarray(regions))
    elif isinstance(regions, Sequence) and not isinstance(regions, str):
        array = table_from_rows(regions)
    else:
        raise TypeError(f"regions must be a sequence of regions, not {type(regions).__name__}")
    if array.shape[0] == 0:
        raise ValueError("regions is empty; NIXL needs at least one")
    table = array
    for r in range(table.shape[0]):
        block_len, stride, count = table[r, BLOCK_LEN], table[r, STRIDE], table[r, COUNT]
        if block_len == 0:
            raise ValueError(f"region {r}: block_len is 0")
        if count == 0:
            raise ValueError(f"region {r}: count is 0")
        if count == 1:
            stride = table[r, STRIDE] = block_len
        if stride < block_len:
            raise ValueError(
                f"region {r}: stride {stride} is smaller than block_len {block_len}; blocks overlap"
            )
        room = UINT64_MAX - table[r, BASE]  # from the first byte to the last addressable one
        if block_len - 1 > room or count - 1 > (room - (block_len - 1)) // stride:
            raise ValueError(
                f"region {r}: base {table[r, BASE]} with {count} blocks of {block_len} bytes, "
                f"{stride} bytes apart, ends beyond 2**64"
            )
        if count >= <uint64_t>INDEX_LIMIT - num_descs:
            raise ValueError(
                f"region {r}: count {count} after {num_descs} blocks before it; NIXL numbers at "
                "most 2**31 - 1"
            )
        num_descs += count
    return array


def strided_descs(regions):
    """The compressed descriptor table of ``regions``, one row each.

    Args:
        regions: a sequence of ``(base, block_len, stride, count, device)``, or an (R, 5) integer
            array; addresses, lengths and strides in bytes.

    Returns:
        A uint64 array of shape (R, 5) with rows ``(address, block_len, device, stride, count)``,
        which NIXL's ``prep_xfer_dlist`` takes as a strided list. The stride of a region of one
        block is its block length.

    Raises:
        ValueError: a region is empty, overlaps itself (stride below block length), reaches beyond
            2**64, or there are 2**31 blocks or more in all. The message names region and value.
    """
    return region_table(regions).take((BASE, BLOCK_LEN, DEVICE, STRIDE, COUNT), axis=1)


cdef void write_dense(const uint64_t* region, uint64_t* out) noexcept nogil:
    """Needs room for 3 * count values, and the last block to lie below 2**64."""
    cdef uint64_t i
    for i in range(region[COUNT]):
        out[3 * i] = region[BASE] + i * region[STRIDE]
        out[3 * i + 1] = region[BLOCK_LEN]
        out[3 * i + 2] = region[DEVICE]


def dense_descs(regions):
    """The descriptor table of ``regions``, one row per block, region by region.

    A strided table (`strided_descs`) says the same in one row per region and is far cheaper to
    build and to prepare.

    Args:
        regions: as for `strided_descs`.

    Returns:
        A uint64 array of shape (N, 3) with rows ``(address, block_len, device)``.

    Raises:
        ValueError: as for `strided_descs`.
    """
    checked = region_table(regions)
    descs = np.empty((int(checked[:, COUNT].sum()), 3), UINT64)
    cdef uint64_t[:, ::1] table = checked
    cdef uint64_t[:, ::1] out = descs
    cdef Py_ssize_t r
    cdef Py_ssize_t row = 0
    for r in range(table.shape[0]):
        write_dense(&table[r, 0], &out[row, 0])
        row += table[r, COUNT]
    return descs


# --- descriptor ids and runs --------------------------------------------------------------------


cdef void expand(
    const int32_t* block_ids, Py_ssize_t size, int32_t first, int32_t* out
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(size):
        out[i] = first + block_ids[i]


cdef object duplicate_destination(Ids dst, int32_t value, Name name):
    first, second = [i for i in range(dst.size) if dst.data[i] == value][:2]
    return ValueError(f"{name}: {value} occurs twice, at positions {first} and {second}")


cdef Py_ssize_t order_runs(Ids dst, Ids src, Name dst_name) except -1:
    """Orders the pairs by destination, in place, unless that would join no runs; returns how many
    runs there are. Both lists have the same length."""
    cdef Py_ssize_t num_runs = kvnixl_count_runs(dst.data, src.data, dst.size)
    cdef Py_ssize_t num_joined
    cdef int32_t duplicate = 0
    cdef kvnixl_run_t* runs
    cdef kvnixl_run_t* ordered
    if kvnixl_is_ascending(dst.data, dst.size):
        return num_runs
    runs = <kvnixl_run_t*>PyMem_Malloc(2 * num_runs * sizeof(kvnixl_run_t))
    if runs == NULL:
        raise MemoryError()
    try:
        kvnixl_find_runs(dst.data, src.data, dst.size, runs)
        ordered = kvnixl_sort_runs(runs, runs + num_runs, num_runs)
        num_joined = kvnixl_join_runs(ordered, num_runs, &duplicate)
        if num_joined < 0:
            raise duplicate_destination(dst, duplicate, dst_name)
        if num_joined < num_runs:
            kvnixl_write_runs(ordered, num_joined, dst.data, src.data)
        return num_joined
    finally:
        PyMem_Free(runs)


cdef object array_from(Ids ids):
    cdef int32_t[::1] out
    array = np.empty(ids.size, INT32)
    if ids.size > 0:
        out = array
        memcpy(&out[0], ids.data, ids.size * sizeof(int32_t))
    return array


def runs(dst, src):
    """Orders index pairs so that neighbours on both sides stand next to each other.

    NIXL merges only pairs that follow each other in the lists and step by one on both sides.
    The set of pairs stays the same. An order that cannot be improved is kept, also if it is not
    ascending.

    Args:
        dst: the indices that are written (the local side of a READ), each at most once.
        src: the indices that are read, as many.

    Returns:
        ``(dst_ordered, src_ordered, num_runs)``: two new C-contiguous int32 arrays and the number
        of maximal stretches in which both sides step by one.

    Raises:
        IndexError: an index is negative or not below 2**31.
        ValueError: the lengths differ, a destination occurs twice, or something is no integer.
    """
    cdef Name name = Name("destination indices")
    cdef Ids dst_ids = ids_from(dst, name, INDEX_LIMIT)
    cdef Ids src_ids = ids_from(src, Name("source indices"), INDEX_LIMIT)
    cdef Py_ssize_t num_runs
    if dst_ids.size != src_ids.size:
        raise ValueError(
            f"{dst_ids.size} destination and {src_ids.size} source indices: the lengths differ"
        )
    num_runs = order_runs(dst_ids, src_ids, name)
    return array_from(dst_ids), array_from(src_ids), num_runs


@cython.final
cdef class RegionIndex:
    """The regions of one side of a transfer, and the descriptor ids of their blocks.

    Immutable; built once per side and peer. Block ``b`` of region ``r`` has the descriptor id
    ``count of all regions before r + b``, in the strided and in the dense table alike.

    Args:
        regions: as for `strided_descs`.
        groups: for each region the number of the cache group whose block ids address it; groups
            are numbered from 0 on and each has a region. ``None``: one group.

    Raises:
        ValueError: as for `strided_descs`, or the groups do not fit the regions.
    """

    cdef uint64_t[:, ::1] table
    cdef int32_t[::1] group_of_region
    cdef int32_t[::1] first_id
    cdef int64_t[::1] group_blocks  # block count of the group's smallest region
    cdef int64_t[::1] group_regions  # number of the group's regions
    cdef readonly Py_ssize_t num_regions
    cdef readonly Py_ssize_t num_groups
    cdef readonly Py_ssize_t num_descs

    def __cinit__(self, regions, groups=None):
        cdef Py_ssize_t r, group
        cdef Ids group_ids
        self.table = region_table(regions)
        self.num_regions = self.table.shape[0]
        group_ids = ids_from(
            (0,) * self.num_regions if groups is None else groups, Name("cache groups"), INDEX_LIMIT
        )
        if group_ids.size != self.num_regions:
            raise ValueError(f"{group_ids.size} cache groups for {self.num_regions} regions")
        self.group_of_region = array_from(group_ids)
        self.num_groups = 0
        for r in range(self.num_regions):
            group = self.group_of_region[r]
            if group >= self.num_regions:
                raise ValueError(
                    f"region {r}: cache group {group} is impossible with {self.num_regions} "
                    "regions; number groups from 0 on, without gaps"
                )
            self.num_groups = max(self.num_groups, group + 1)
        self.first_id = np.empty(self.num_regions, INT32)
        self.group_blocks = np.full(self.num_groups, INT32_MAX, np.int64)
        self.group_regions = np.zeros(self.num_groups, np.int64)
        self.num_descs = 0
        for r in range(self.num_regions):
            group = self.group_of_region[r]
            self.first_id[r] = <int32_t>self.num_descs
            self.num_descs += self.table[r, COUNT]
            self.group_regions[group] += 1
            self.group_blocks[group] = min(self.group_blocks[group], <int64_t>self.table[r, COUNT])
        for group in range(self.num_groups):
            if self.group_regions[group] == 0:
                raise ValueError(f"cache group {group} has no region; number groups without gaps")

    @property
    def regions(self):
        """A copy of the regions: uint64, shape (R, 5), columns ``(base, block_len, stride, count,
        device)``. The stride of a region of one block is its block length."""
        return np.array(self.table)

    @property
    def groups(self):
        """The cache group of each region."""
        return tuple(self.group_of_region)

    def desc_ids(self, block_ids, out=None):
        """Descriptor ids of blocks in all regions.

        Args:
            block_ids: one sequence of block ids per cache group.
            out: a writable C-contiguous int32 array, at least as long as the result, to write to
                instead of a new one.

        Returns:
            A C-contiguous int32 array: region by region, the ids of its group's blocks, in the
            given order. With ``out``, the view of its beginning.

        Raises:
            IndexError: a block id is negative or not below the block count of each of its regions.
            ValueError: not one sequence per group, something is no integer, or ``out`` does not
                fit.
        """
        cdef list lists = block_lists(self, block_ids, "block ids")
        cdef Py_ssize_t total = count_ids(self, lists)
        if out is None:
            ids = np.empty(total, INT32)
        else:
            check_out(out, total)
            ids = out[:total]
        write_ids(self, lists, ids)
        return ids

    def __repr__(self):
        return (
            f"RegionIndex(num_regions={self.num_regions}, num_groups={self.num_groups}, "
            f"num_descs={self.num_descs})"
        )


cdef list block_lists(RegionIndex index, object block_ids, str what):
    """One `Ids` per cache group, each id below the block count of all regions of the group."""
    cdef Py_ssize_t group
    try:
        groups = tuple(block_ids)
    except TypeError:
        raise TypeError(
            f"{what} must be one sequence per cache group, not {type(block_ids).__name__}"
        ) from None
    if len(groups) != index.num_groups:
        raise ValueError(f"{what}: {len(groups)} sequences for {index.num_groups} cache groups")
    return [
        ids_from(groups[group], Name(what, group), index.group_blocks[group])
        for group in range(index.num_groups)
    ]


cdef Py_ssize_t count_ids(RegionIndex index, list lists) except -1:
    cdef Py_ssize_t group
    cdef int64_t total = 0  # cannot overflow: fewer than 2**31 regions, fewer than 2**31 ids each
    for group in range(index.num_groups):
        total += (<Ids>lists[group]).size * index.group_regions[group]
    if total >= INDEX_LIMIT:
        raise ValueError(f"{total} descriptor ids are too many; NIXL takes at most 2**31 - 1")
    return total


cdef object check_out(object out, Py_ssize_t total):
    # No subclass: what it answers here need not be what its buffer is.
    if type(out) is not np.ndarray or out.dtype != INT32 or out.ndim != 1:
        raise ValueError("out must be a one-dimensional int32 array")
    if not (out.flags.c_contiguous and out.flags.writeable and out.flags.aligned):
        raise ValueError("out must be C-contiguous, aligned and writable")
    if out.shape[0] < total:
        raise ValueError(f"out has room for {out.shape[0]} ids; {total} are needed")


cdef object write_ids(RegionIndex index, list lists, int32_t[::1] out):
    """``out`` has `count_ids` elements."""
    cdef Ids ids
    cdef Py_ssize_t r
    cdef Py_ssize_t written = 0
    if out.shape[0] == 0:
        return
    for r in range(index.num_regions):
        ids = <Ids>lists[index.group_of_region[r]]
        expand(ids.data, ids.size, index.first_id[r], &out[0] + written)
        written += ids.size


cdef object check_same_shape(RegionIndex dst, RegionIndex src):
    cdef Py_ssize_t r
    if dst.num_regions != src.num_regions:
        raise ValueError(
            f"the destination has {dst.num_regions} regions, the source {src.num_regions}"
        )
    for r in range(dst.num_regions):
        if dst.group_of_region[r] != src.group_of_region[r]:
            raise ValueError(
                f"region {r} is in cache group {dst.group_of_region[r]} at the destination, in "
                f"{src.group_of_region[r]} at the source"
            )
        if dst.table[r, BLOCK_LEN] != src.table[r, BLOCK_LEN]:
            raise ValueError(
                f"region {r} has block_len {dst.table[r, BLOCK_LEN]} at the destination, "
                f"{src.table[r, BLOCK_LEN]} at the source"
            )


def paired_desc_ids(RegionIndex dst not None, dst_blocks, RegionIndex src not None, src_blocks):
    """The index lists of one transfer, ordered into as few descriptors as possible.

    Orders the block pairs of each cache group as `runs` does and expands them over the group's
    regions on both sides.

    Args:
        dst: the regions that are written (the local side of a READ).
        dst_blocks: one sequence of block ids per cache group; within a group each at most once.
        src: the regions that are read: as many, with the same cache groups and block lengths.
        src_blocks: one sequence of block ids per cache group, each as long as the destination's.

    Returns:
        ``(dst_ids, src_ids, num_descs)``: two C-contiguous int32 arrays, region by region, and the
        number of descriptors that NIXL is left with after merging, if both prepared lists are
        strided: NIXL then merges only inside a region, where the blocks touch on both sides. From
        dense lists it may merge further, from the end of a region into the next.

    Raises:
        IndexError: a block id is negative or not below the block count of each of its regions.
        ValueError: the sides do not match, the lengths differ, a destination occurs twice, or
            something is no integer.
    """
    cdef list dst_lists, src_lists
    cdef list group_runs = []
    cdef Py_ssize_t r, group, num_dst, num_src, total
    cdef Py_ssize_t num_descs = 0
    check_same_shape(dst, src)
    dst_lists = block_lists(dst, dst_blocks, "destination block ids")
    src_lists = block_lists(src, src_blocks, "source block ids")
    for group in range(dst.num_groups):
        num_dst, num_src = (<Ids>dst_lists[group]).size, (<Ids>src_lists[group]).size
        if num_dst != num_src:
            raise ValueError(
                f"group {group}: {num_dst} destination and {num_src} source block ids: the lengths "
                "differ"
            )
        group_runs.append(
            order_runs(
                <Ids>dst_lists[group], <Ids>src_lists[group], Name("destination block ids", group)
            )
        )
    total = count_ids(dst, dst_lists)
    dst_ids = np.empty(total, INT32)
    src_ids = np.empty(total, INT32)
    write_ids(dst, dst_lists, dst_ids)
    write_ids(src, src_lists, src_ids)
    for r in range(dst.num_regions):
        group = dst.group_of_region[r]
        if (
            dst.table[r, STRIDE] == dst.table[r, BLOCK_LEN]
            and src.table[r, STRIDE] == src.table[r, BLOCK_LEN]
        ):
            num_descs += group_runs[group]
        else:
            num_descs += (<Ids>dst_lists[group]).size
    return dst_ids, src_ids, num_descs
