# cython: auto_pickle=False, autotestdict=False
"""The hot half of `kvnixl.leases`: who holds which slot, the slot words, the checks of a reader.

`SlotPool` hands out slots and nonces. `SlotWriter` stores and clears lease words. `CheckTable`
holds the checks of a reader in C arrays, groups those that may start into one `SlotRead` per remote
rank, hands out landing cells and compares what the READs brought. It knows no NIXL: what polls and
releases is passed in.

Words are reached only through ``csrc/kvnixl_slots.h``. Every index that comes from outside is
compared with its bound once, when it enters; the loops then run unchecked.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.dict cimport PyDict_GetItem
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.stdlib cimport qsort

import numpy as np

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int* overflow) except? -1

cdef extern from "kvnixl_fence.h" nogil:
    void kvnixl_publish_fence()
    void kvnixl_observe_fence()

cdef extern from "kvnixl_slots.h" nogil:
    void kvnixl_word_store(int64_t* word, int64_t value)
    int64_t kvnixl_next_nonce(int64_t nonce)
    void kvnixl_cell_poison(int64_t* cell, int64_t nonce)
    bint kvnixl_cell_holds(const int64_t* cell, int64_t nonce)

cdef object INT32 = np.dtype(np.int32)


# Returns -1 for what does not fit: no slot and no nonce is negative.
cdef inline int64_t as_int64(object value) except? -1:
    cdef int overflow = 0
    cdef long long number = PyLong_AsLongLongAndOverflow(value, &overflow)
    return -1 if overflow else number


# --- producer -----------------------------------------------------------------------------------


cdef class SlotPool:
    """Slots and nonces of one producer engine; see `kvnixl.leases.LeaseSlotAllocator`.

    Args:
        num_slots: how many slots there are.
        first_nonce: 1 to 2**63-1; nonces count up from here.
    """

    cdef readonly int num_slots
    cdef list free          # a stack of slots
    cdef int64_t last_nonce
    cdef dict leases        # request id -> (slot, nonce)
    cdef dict to_arm        # what changed since take_updates
    cdef set to_clear
    cdef bint said_full     # it was said that no slot is free, and not yet are half of them

    def __init__(self, int num_slots, int64_t first_nonce) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be in 1 to 2**31-1, not {num_slots}")
        if first_nonce < 1:
            raise ValueError(f"first_nonce must be in 1 to 2**63-1, not {first_nonce}")
        self.num_slots = num_slots
        self.free = list(range(num_slots - 1, -1, -1))
        self.last_nonce = first_nonce - 1
        self.leases = {}
        self.to_arm = {}
        self.to_clear = set()
        self.said_full = False

    @property
    def num_free(self) -> int:
        """How many slots are free."""
        return len(self.free)

    def get(self, req_id: object) -> object:
        """The request's ``(slot, nonce)``, or ``None`` when it holds no lease."""
        return self.leases.get(req_id)

    def acquire(self, req_id: object) -> object:
        """Give the request a lease. Later calls return the same one.

        Returns:
            ``(slot, nonce)``, or ``None`` when no slot is free.
        """
        cdef PyObject* found = PyDict_GetItem(self.leases, req_id)
        if found is not NULL:
            return <object>found
        if not self.free:
            if not self.said_full:
                self.said_full = self.when_full()
            return None
        self.last_nonce = kvnixl_next_nonce(self.last_nonce)
        lease = (self.free.pop(), self.last_nonce)
        self.leases[req_id] = lease
        self.to_arm[req_id] = lease
        return lease

    def release(self, req_id: object, *, bint clear) -> None:
        """End the request's lease and free its slot. Unknown requests are ignored.

        Args:
            clear: the workers have no send record that will clear the word, so `take_updates` is to
                tell them. A lease that was never sent to them is not armed any more and needs no
                clear.
        """
        lease = self.leases.pop(req_id, None)
        if lease is None:
            return
        self.free.append((<tuple>lease)[0])
        if self.said_full and 2 * len(self.free) >= self.num_slots:
            self.said_full = False
        if self.to_arm.pop(req_id, None) is None and clear:
            self.to_clear.add(req_id)

    def take_updates(self) -> tuple:
        """What changed since the last call.

        Returns:
            ``(to_arm, to_clear)``: request id -> ``(slot, nonce)``, and request ids. Both belong to
            the caller.
        """
        updates = (self.to_arm, self.to_clear)
        self.to_arm = {}
        self.to_clear = set()
        return updates

    def when_full(self) -> bool:
        """Called when a request gets no slot. True: not again until half of the slots are free."""
        return True


@cython.final
cdef class SlotWriter:
    """Stores the leases of one producer into its slot words.

    Args:
        words: the slot words, writable int64, one-dimensional and contiguous.
    """

    cdef int64_t[::1] words
    cdef dict leases   # request id -> (slot, nonce)
    cdef list holders  # slot -> request id
    cdef readonly bint dirty  # whether a word was stored since `mark_clean`

    def __cinit__(self, int64_t[::1] words not None) -> None:
        self.words = words
        self.leases = {}
        self.holders = [None] * words.shape[0]
        self.dirty = False

    def __len__(self) -> int:
        """How many requests hold a lease."""
        return len(self.leases)

    def nonce(self, req_id: object) -> object:
        """The nonce of the request's lease, or ``None`` when it holds none."""
        cdef PyObject* lease = PyDict_GetItem(self.leases, req_id)
        if lease is NULL:
            return None
        return (<tuple>lease)[1]

    def clear(self, req_id: object) -> None:
        """End the request's lease. Unknown requests are ignored."""
        cdef PyObject* lease = PyDict_GetItem(self.leases, req_id)
        if lease is not NULL:
            self.empty(<tuple>lease)
            del self.leases[req_id]

    def update(self, to_clear: object, dict to_arm not None) -> None:
        """Clear the requests in ``to_clear``, then store the leases of ``to_arm``.

        A lease takes its slot from a request that still has it, and replaces the request's own.

        Args:
            to_clear: request ids.
            to_arm: request id -> ``(slot, nonce)``.

        Raises:
            IndexError: a slot does not exist.
            ValueError: a nonce is not in 1 to 2**63-1.
        """
        cdef int64_t slot, nonce, num_slots = self.words.shape[0]
        cdef PyObject* former
        for req_id in to_clear:
            self.clear(req_id)
        for req_id, lease in to_arm.items():
            new_slot, new_nonce = lease
            slot = as_int64(new_slot)
            nonce = as_int64(new_nonce)
            if slot < 0 or slot >= num_slots:
                raise IndexError(
                    f"request {req_id!r}: lease slot {new_slot} is outside 0 to {num_slots - 1}"
                )
            if nonce <= 0:
                raise ValueError(f"request {req_id!r}: nonce {new_nonce} is outside 1 to 2**63-1")
            former = PyDict_GetItem(self.leases, req_id)
            if former is not NULL and <int64_t><object>(<tuple>former)[0] != slot:
                self.empty(<tuple>former)
            holder = self.holders[slot]
            if holder is not None and holder != req_id:
                del self.leases[holder]
            kvnixl_word_store(&self.words[slot], nonce)
            self.dirty = True
            self.holders[slot] = req_id
            self.leases[req_id] = lease if type(lease) is tuple else tuple(lease)

    def mark_clean(self) -> None:
        """Say that a fence ordered every store so far."""
        self.dirty = False

    cdef int empty(self, tuple lease) except -1:
        cdef int64_t slot = lease[0]
        kvnixl_word_store(&self.words[slot], 0)
        self.dirty = True
        self.holders[slot] = None
        return 0


# --- reader -------------------------------------------------------------------------------------

cdef struct Check:
    int64_t nonce
    int32_t slot
    int32_t remote
    int32_t next        # next check of the request, or next free check

cdef struct Request:
    double deadline     # of the wait for landing cells
    int32_t first       # its checks, as added, until they become part of READs
    int32_t last
    int32_t num_checks
    int32_t unread      # checks in READs that have not ended
    int32_t next        # next in the waiting line, or next free request
    int32_t stage

cdef struct Remote:
    int32_t num_slots
    int32_t num_checks  # checks that are not part of a READ yet
    int32_t num_reads   # READs that are not released yet
    int32_t batch       # checks that the READ being built will hold
    PyObject* read      # the READ being built, owned by a list meanwhile
    bint closed

cdef enum:
    NONE = -1

# Stages of a request. ENDED: it has its outcome or nobody wants it any more, but it still stands in
# the waiting line or has checks in flight.
cdef enum:
    FREE
    ADDED
    WAITING
    READING
    ENDED

# Phases of a READ. UNWANTED: it runs, but its requests have ended; the backend may write its cells.
cdef enum:
    RUNNING
    UNWANTED
    OVER
    RELEASED

cdef struct Entry:
    int64_t nonce
    int32_t slot
    int32_t cell
    int32_t request


cdef int by_slot(const void* left, const void* right) noexcept nogil:
    cdef int32_t a = (<const Entry*>left).slot
    cdef int32_t b = (<const Entry*>right).slot
    return (a > b) - (a < b)


cdef int by_value(const void* left, const void* right) noexcept nogil:
    cdef int32_t a = (<const int32_t*>left)[0]
    cdef int32_t b = (<const int32_t*>right)[0]
    return (a > b) - (a < b)


@cython.final
cdef class SlotRead:
    """One READ of lease slots of one remote rank into landing cells. `CheckTable` makes it.

    ``len()`` is the number of cells. Slots and cells ascend, because NIXL merges neighbouring index
    pairs into one descriptor.

    Attributes:
        engine_id, remote_rank: whose slots are read.
        remote_handle: the prepared list of that rank's slots.
        handle: the transfer handle, ``None`` before `CheckTable.track`.
    """

    cdef Entry* entries
    cdef int32_t size
    cdef int32_t remote
    cdef int phase
    cdef bint quarantined
    cdef double deadline
    cdef list singles
    cdef readonly str engine_id
    cdef readonly object remote_rank
    cdef readonly object remote_handle
    cdef readonly object handle

    def __init__(self) -> None:
        raise TypeError("only a CheckTable makes READs")

    def __dealloc__(self) -> None:
        PyMem_Free(self.entries)

    def __len__(self) -> int:
        return self.size

    @property
    def cells(self) -> np.ndarray:
        """Indices of the landing cells, an int32 array of shape ``(len,)`` that never changes."""
        if self.size == 1:
            return self.single(self.entries[0].cell)
        return self.indices(False)

    @property
    def slots(self) -> np.ndarray:
        """Indices of the remote slots, an int32 array of shape ``(len,)`` that never changes."""
        if self.size == 1 and self.entries[0].slot < <int32_t>len(self.singles):
            return self.single(self.entries[0].slot)
        return self.indices(True)

    # Most READs are of one slot, and NumPy takes longer to make an array than all the rest takes.
    cdef object single(self, int32_t index):
        array = self.singles[index]
        if array is None:
            array = np.array([index], INT32)
            array.flags.writeable = False
            self.singles[index] = array
        return array

    cdef object indices(self, bint slots):
        cdef Py_buffer buffer
        cdef int32_t i
        array = np.empty(self.size, INT32)
        PyObject_GetBuffer(array, &buffer, PyBUF_WRITABLE)
        for i in range(self.size):
            (<int32_t*>buffer.buf)[i] = self.entries[i].slot if slots else self.entries[i].cell
        PyBuffer_Release(&buffer)
        return array


@cython.final
cdef class CheckTable:
    """The checks of one reader, their landing cells and their READs.

    Args:
        words: the landing cells, writable int64, one-dimensional and contiguous.
        release_is_final: whether a READ in flight may be released, because then it writes no more.
    """

    cdef int64_t[::1] words
    cdef int32_t* free_cells     # a stack, the next cell on top
    cdef readonly int num_free_cells
    cdef bint cells_unordered    # the stack does not descend

    cdef Check* checks
    cdef int32_t check_capacity
    cdef int32_t free_check

    cdef Request* requests
    cdef int32_t request_capacity
    cdef int32_t free_request
    cdef list ids                # request -> id
    cdef dict index              # id -> request, for those without an outcome
    cdef dict doomed             # request -> why it will fail once its block READs are done
    cdef dict failed_early       # id -> reason, to be reported by the next step

    cdef int32_t first_waiting
    cdef int32_t last_waiting
    cdef readonly int num_waiting

    cdef Remote* remotes
    cdef int32_t remote_capacity
    cdef list free_remotes
    cdef list remote_names       # remote -> (engine id, rank)
    cdef list remote_handles     # remote -> prepared list
    cdef dict engines            # engine id -> {rank: remote}
    cdef list closed_handles     # prepared lists that no READ uses any more
    cdef list messages           # for the log

    cdef list singles            # index -> array of that index, made when first used
    cdef list reads              # not released yet
    cdef bint release_is_final
    cdef readonly int quarantined_cells

    def __cinit__(self, int64_t[::1] words not None, bint release_is_final) -> None:
        cdef Py_ssize_t num_cells = words.shape[0]
        if num_cells < 1 or num_cells > INT32_MAX:
            raise ValueError(f"num_cells must be in 1 to 2**31-1, not {num_cells}")
        self.words = words
        self.free_cells = <int32_t*>PyMem_Malloc(num_cells * sizeof(int32_t))
        if self.free_cells is NULL:
            raise MemoryError
        self.num_free_cells = <int32_t>num_cells
        self.order_cells()
        self.free_check = self.free_request = NONE
        self.first_waiting = self.last_waiting = NONE
        self.ids = []
        self.index = {}
        self.doomed = {}
        self.failed_early = {}
        self.free_remotes = []
        self.remote_names = []
        self.remote_handles = []
        self.engines = {}
        self.closed_handles = []
        self.messages = []
        self.singles = [None] * num_cells
        self.reads = []
        self.release_is_final = release_is_final

    def __dealloc__(self) -> None:
        PyMem_Free(self.free_cells)
        PyMem_Free(self.checks)
        PyMem_Free(self.requests)
        PyMem_Free(self.remotes)

    @property
    def has_checks(self) -> bool:
        """Whether a request has no outcome yet, or one that was not reported."""
        return bool(self.index) or bool(self.failed_early)

    @property
    def active(self) -> bool:
        """Whether a step has anything to do when no block READ has completed."""
        return (
            self.num_waiting != 0
            or bool(self.reads)
            or bool(self.failed_early)
            or bool(self.closed_handles)
        )

    # remotes

    def add_remote(
        self, str engine_id not None, rank: object, handle: object, int32_t num_slots
    ) -> None:
        """Make a remote rank known, in place of an earlier one of the same name."""
        cdef dict ranks = self.engines.get(engine_id)
        cdef int32_t remote
        if ranks is not None and rank in ranks:
            if self.remote_handles[<int32_t>ranks[rank]] == handle:
                self.remotes[<int32_t>ranks[rank]].num_slots = num_slots
                return
            self.close_remote(engine_id, rank)
        if self.free_remotes:
            remote = self.free_remotes.pop()
        else:
            remote = len(self.remote_names)
            if remote == self.remote_capacity:
                self.grow_remotes()
            self.remote_names.append(None)
            self.remote_handles.append(None)
        self.remotes[remote] = Remote(num_slots, 0, 0, 0, NULL, False)
        self.remote_names[remote] = (engine_id, rank)
        self.remote_handles[remote] = handle
        self.engines.setdefault(engine_id, {})[rank] = remote

    def knows(self, engine_id: object, ranks: object) -> bool:
        """Whether every one of the ranks is known."""
        cdef dict known = self.engines.get(engine_id)
        if known is None:
            return False
        for rank in ranks:
            if rank not in known:
                return False
        return True

    def close_engine(self, engine_id: object) -> None:
        """Forget the engine. Its checks fail, its READs run on unwanted."""
        for rank in list(self.engines.get(engine_id, ())):
            self.close_remote(engine_id, rank)

    def close_all(self) -> None:
        """Forget every engine and request without an outcome."""
        for engine_id in list(self.engines):
            self.close_engine(engine_id)
        for req_id in list(self.index):
            self.discard(req_id)
        self.failed_early.clear()

    def busy_engines(self) -> set:
        """Engines of which checks have no result yet or READs are not released."""
        cdef set busy = set()
        cdef int32_t remote
        for remote in range(<int32_t>len(self.remote_names)):
            if self.remotes[remote].num_checks or self.remotes[remote].num_reads:
                busy.add(self.remote_names[remote][0])
        return busy

    @property
    def has_leftovers(self) -> bool:
        """Whether there are prepared lists to release or messages to log."""
        return bool(self.closed_handles) or bool(self.messages)

    def take_closed_handles(self) -> list:
        """Prepared lists to release, each returned once."""
        handles = self.closed_handles
        self.closed_handles = []
        return handles

    def return_closed_handle(self, handle: object) -> None:
        """Take back a prepared list that could not be released."""
        self.closed_handles.append(handle)

    def take_messages(self) -> list:
        """Sentences for the log, each returned once."""
        messages = self.messages
        self.messages = []
        return messages

    # checks

    def add_checks(
        self, req_id: object, engine_id: object, ranks: object, slot: object, nonce: object
    ) -> None:
        """Add one check per rank, all of the same slot and nonce.

        Raises:
            ValueError: the request is being verified.
        """
        cdef int32_t request, remote, check
        cdef int64_t slot_, nonce_
        cdef PyObject* known
        cdef PyObject* found = PyDict_GetItem(self.index, req_id)
        if found is not NULL:
            request = <int32_t><object>found
            if self.requests[request].stage != ADDED:
                raise ValueError(f"request {req_id!r} is being verified; discard it first")
        elif self.failed_early and req_id in self.failed_early:
            raise ValueError(
                f"the outcome of request {req_id!r} was not collected; step or discard it first"
            )
        else:
            request = self.new_request(req_id)
        try:
            slot_ = as_int64(slot)
            nonce_ = as_int64(nonce)
            known = PyDict_GetItem(self.engines, engine_id)
            for rank in ranks:
                found = PyDict_GetItem(<dict>known, rank) if known is not NULL else NULL
                if found is NULL:
                    self.doom(request, unreadable(engine_id, rank, "the rank is not known"))
                    continue
                remote = <int32_t><object>found
                if slot_ < 0 or slot_ >= self.remotes[remote].num_slots:
                    self.doom(request, unreadable(engine_id, rank, f"there is no slot {slot}"))
                    continue
                if nonce_ <= 0:
                    self.doom(request, unreadable(engine_id, rank, f"{nonce} is no nonce"))
                    continue
                check = self.free_check
                if check == NONE:
                    check = self.grow_checks()
                self.free_check = self.checks[check].next
                self.checks[check] = Check(nonce_, <int32_t>slot_, remote, NONE)
                if self.requests[request].first == NONE:
                    self.requests[request].first = check
                else:
                    self.checks[self.requests[request].last].next = check
                self.requests[request].last = check
                self.requests[request].num_checks += 1
                self.remotes[remote].num_checks += 1
        except BaseException:
            # Some ranks may lack their check; the others must not pass for all of them.
            self.doom(request, f"the checks of request {req_id!r} could not all be added")
            raise

    def discard(self, req_id: object) -> None:
        """Forget the request: it will not be reported. Unknown requests are ignored."""
        cdef int32_t request
        self.failed_early.pop(req_id, None)
        found = self.index.pop(req_id, None)
        if found is not None:
            request = found
            self.end_request(request)

    # step

    def step(
        self,
        agent: object,
        reads_done: object,
        double now,
        double timeout,
        set verified not None,
        dict failed not None,
    ) -> object:
        """One step, up to posting: judge the READs that ended, release them, start new checks.

        Args:
            agent: its ``check_xfer_state`` and ``release_xfer_handle`` are called.
            reads_done: ids of requests whose block READs have completed.
            now: time on the clock of the deadlines.
            timeout: seconds that a READ may take, and a request may wait for landing cells.
            verified, failed: take the outcomes.

        Returns:
            New `SlotRead` objects, one per remote rank. Their cells are poisoned; every one has to
            go to `track` or `drop`.
        """
        if self.failed_early:
            failed.update(self.failed_early)
            self.failed_early.clear()
        if self.reads:
            self.poll(agent, now, verified, failed)
        if reads_done:
            self.start(reads_done, now + timeout, verified, failed)
        if self.num_waiting:
            return self.admit(now, now + timeout, failed)
        return ()

    cdef int poll(self, agent, double now, set verified, dict failed) except -1:
        cdef list reads = self.reads, kept = None
        cdef SlotRead read
        cdef Py_ssize_t i
        for i, read in enumerate(reads):
            if read.phase < OVER:
                try:
                    state = agent.check_xfer_state(read.handle)
                except Exception as exc:
                    self.advance(read, False, None, exc, now, verified, failed)
                else:
                    self.advance(read, False, state, None, now, verified, failed)
            if read.phase == OVER:
                self.release(read, agent)
            # Most polls end nothing and leave the list alone.
            if read.phase == RELEASED and kept is None:
                kept = reads[:i]
            elif read.phase != RELEASED and kept is not None:
                kept.append(read)
        if kept is not None:
            self.reads = kept
        return 0

    # Queues the checks of the requests.
    cdef int start(self, reads_done, double deadline, set verified, dict failed) except -1:
        cdef int32_t request
        cdef PyObject* found
        cdef Request* entry
        for req_id in reads_done:
            found = PyDict_GetItem(self.index, req_id)
            if found is NULL:
                if req_id not in verified and req_id not in failed:
                    failed[req_id] = "no lease is known for this request, its read proves nothing"
                continue
            request = <int32_t><object>found
            entry = &self.requests[request]
            if entry.stage != ADDED:
                continue  # a repeated completion
            if self.doomed:
                reason = self.doomed.get(request)
                if reason is not None:
                    self.fail(request, reason, failed)
                    continue
            if entry.num_checks == 0:
                self.fail(request, "the request was checked with no rank", failed)
                continue
            if entry.num_checks > self.words.shape[0]:
                self.fail(
                    request,
                    f"the request needs {entry.num_checks} landing cells for lease slots, but only "
                    f"{self.words.shape[0]} exist (num_cells)",
                    failed,
                )
                continue
            entry.stage = WAITING
            entry.deadline = deadline
            entry.next = NONE
            if self.last_waiting == NONE:
                self.first_waiting = request
            else:
                self.requests[self.last_waiting].next = request
            self.last_waiting = request
            self.num_waiting += 1
        return 0

    # Takes requests from the waiting line, in order, as long as there are landing cells, and makes
    # one READ per remote rank of them.
    cdef list admit(self, double now, double deadline, dict failed):
        cdef int32_t request, check, next_check, remote, room = self.num_free_cells
        cdef int32_t first = NONE, last = NONE
        cdef list touched = []
        cdef list reads = []
        cdef Request* entry
        cdef Check* item
        cdef Entry* place
        cdef SlotRead read
        while self.first_waiting != NONE:
            request = self.first_waiting
            entry = &self.requests[request]
            if entry.stage == WAITING and entry.num_checks > room:
                if entry.deadline > now:
                    break
                self.fail(
                    request,
                    f"too few landing cells for the lease slots became free in time "
                    f"({entry.num_checks} needed, {self.quarantined_cells} of "
                    f"{self.words.shape[0]} in quarantine)",
                    failed,
                )
            self.first_waiting = entry.next
            self.num_waiting -= 1
            if entry.stage == ENDED:
                self.recycle_request(request)
                continue
            room -= entry.num_checks
            entry.stage = READING
            entry.unread = entry.num_checks
            entry.next = NONE
            if last == NONE:
                first = request
            else:
                self.requests[last].next = request
            last = request
            check = entry.first
            while check != NONE:
                remote = self.checks[check].remote
                if self.remotes[remote].batch == 0:
                    touched.append(remote)
                self.remotes[remote].batch += 1
                check = self.checks[check].next
        if self.first_waiting == NONE:
            self.last_waiting = NONE
        if first == NONE:
            return reads

        for remote in touched:
            read = self.new_read(remote, self.remotes[remote].batch)
            read.deadline = deadline
            reads.append(read)
            self.remotes[remote].batch = 0
            self.remotes[remote].read = <PyObject*>read
        while first != NONE:
            entry = &self.requests[first]
            check = entry.first
            while check != NONE:
                item = &self.checks[check]
                read = <SlotRead>self.remotes[item.remote].read
                place = &read.entries[read.size]
                place.nonce = item.nonce
                place.slot = item.slot
                place.request = first
                read.size += 1
                next_check = item.next
                self.recycle_check(check)
                check = next_check
            entry.first = NONE
            first = entry.next
        for read in reads:
            self.place_cells(read)
        # The poison must not reach memory after the word that the READ brings.
        kvnixl_publish_fence()
        return reads

    def requests_of(self, SlotRead read not None) -> list:
        """Ids of the requests that the READ serves and that have no outcome yet."""
        cdef int32_t i, request
        cdef list ids = []
        for i in range(read.size):
            request = read.entries[i].request
            if self.requests[request].stage == READING:
                ids.append(self.ids[request])
        return ids

    def track(self, SlotRead read not None, handle: object) -> None:
        """The READ has a handle now; the next steps ask for its state and release it."""
        self.check_new(read)
        read.handle = handle
        self.reads.append(read)

    def posted(
        self,
        SlotRead read not None,
        state: object,
        error: object,
        agent: object,
        double now,
        set verified not None,
        dict failed not None,
    ) -> None:
        """What posting the READ that was tracked last gave: a state, or an exception."""
        if not self.reads or self.reads[len(self.reads) - 1] is not read:
            raise ValueError("this READ was not tracked last")
        self.advance(read, True, state, error, now, verified, failed)
        if read.phase == OVER:
            self.release(read, agent)
            if read.phase == RELEASED:
                self.reads.pop()

    def split(self, SlotRead read not None) -> list:
        """Cut a READ of several cells that has no handle into two."""
        cdef list parts = []
        cdef SlotRead part
        cdef int32_t i, half = read.size // 2, first, last
        self.check_new(read)
        for first, last in ((0, half), (half, read.size)):
            part = self.new_read(read.remote, last - first)
            for i in range(first, last):
                part.entries[i - first] = read.entries[i]
            part.size = last - first
            part.deadline = read.deadline
            parts.append(part)
        read.size = 0
        read.phase = RELEASED
        self.remotes[read.remote].num_reads -= 1
        return parts

    def drop(self, SlotRead read not None, str cause not None, dict failed not None) -> None:
        """Fail the requests of a READ that has no handle and take its cells back."""
        self.check_new(read)
        self.fail_read(read, cause, failed)
        self.finish(read)

    # insides: requests and checks

    cdef int32_t new_request(self, req_id) except NONE:
        cdef int32_t request = self.free_request
        if request == NONE:
            request = self.grow_requests()
        self.free_request = self.requests[request].next
        self.requests[request] = Request(0.0, NONE, NONE, 0, 0, NONE, ADDED)
        self.ids[request] = req_id
        self.index[req_id] = request
        return request

    cdef int recycle_request(self, int32_t request) except -1:
        self.requests[request].stage = FREE
        self.requests[request].next = self.free_request
        self.free_request = request
        self.ids[request] = None
        return 0

    cdef void recycle_check(self, int32_t check) noexcept:
        self.remotes[self.checks[check].remote].num_checks -= 1
        self.checks[check].next = self.free_check
        self.free_check = check

    cdef int doom(self, int32_t request, str reason) except -1:
        self.doomed.setdefault(request, reason)
        return 0

    cdef void drop_checks(self, int32_t request) noexcept:
        cdef Request* entry = &self.requests[request]
        cdef int32_t check = entry.first, next_check
        while check != NONE:
            next_check = self.checks[check].next
            self.recycle_check(check)
            check = next_check
        entry.first = NONE
        entry.num_checks = 0

    # The request has its outcome. What waits in line or is in flight gives it back later.
    cdef int end_request(self, int32_t request) except -1:
        cdef Request* entry = &self.requests[request]
        self.drop_checks(request)
        if self.doomed:
            self.doomed.pop(request, None)
        if entry.stage == ADDED or (entry.stage == READING and entry.unread == 0):
            self.recycle_request(request)
        else:
            entry.stage = ENDED
        return 0

    cdef int fail(self, int32_t request, str reason, dict failed) except -1:
        req_id = self.ids[request]
        del self.index[req_id]
        failed[req_id] = reason
        return self.end_request(request)

    # insides: remotes

    cdef int close_remote(self, engine_id, rank) except -1:
        cdef dict ranks = self.engines[engine_id]
        cdef int32_t remote = ranks.pop(rank), request, check
        cdef SlotRead read
        if not ranks:
            del self.engines[engine_id]
        cdef str reason = unreadable(engine_id, rank, "the engine was released")
        for request in list(self.index.values()):
            check = self.requests[request].first
            while check != NONE and self.checks[check].remote != remote:
                check = self.checks[check].next
            if check == NONE:
                continue
            if self.requests[request].stage == ADDED:
                self.doom(request, reason)
                self.drop_checks(request)
            else:
                self.fail(request, reason, self.failed_early)
        for read in self.reads:
            if read.remote == remote and read.phase == RUNNING:
                self.fail_read(read, "the engine was released", self.failed_early)
                self.give_up(read)
        self.remotes[remote].closed = True
        return self.forget_remote(remote)

    # Gives a closed remote back once no READ refers to it; checks no longer do.
    cdef int forget_remote(self, int32_t remote) except -1:
        cdef Remote* entry = &self.remotes[remote]
        if entry.closed and entry.num_reads == 0:
            entry.closed = False
            self.closed_handles.append(self.remote_handles[remote])
            self.remote_handles[remote] = None
            self.free_remotes.append(remote)
        return 0

    # insides: READs and cells

    cdef int check_new(self, SlotRead read) except -1:
        if read.phase != RUNNING or read.handle is not None or read.singles is not self.singles:
            raise ValueError("this READ has a handle, was split or dropped, or is of another table")
        return 0

    cdef SlotRead new_read(self, int32_t remote, int32_t capacity):
        cdef SlotRead read = SlotRead.__new__(SlotRead)
        read.entries = <Entry*>PyMem_Calloc(capacity, sizeof(Entry))
        if read.entries is NULL:
            raise MemoryError
        read.phase = RUNNING
        read.singles = self.singles
        read.remote = remote
        read.engine_id, read.remote_rank = self.remote_names[remote]
        read.remote_handle = self.remote_handles[remote]
        self.remotes[remote].num_reads += 1
        return read

    cdef void place_cells(self, SlotRead read) noexcept:
        cdef int32_t i, size = read.size
        cdef bint sorted_slots = True, sorted_cells = True
        self.num_free_cells -= size
        cdef int32_t* taken = self.free_cells + self.num_free_cells
        for i in range(1, size):
            sorted_slots &= read.entries[i - 1].slot <= read.entries[i].slot
            sorted_cells &= taken[i - 1] >= taken[i]
        if not sorted_slots:
            qsort(read.entries, size, sizeof(Entry), by_slot)
        if not sorted_cells:
            qsort(taken, size, sizeof(int32_t), by_value)
        for i in range(size):
            # The stack descends, the cells of a READ ascend.
            read.entries[i].cell = taken[i] if not sorted_cells else taken[size - 1 - i]
            kvnixl_cell_poison(&self.words[read.entries[i].cell], read.entries[i].nonce)

    cdef void order_cells(self) noexcept:
        cdef int32_t i, num_cells = <int32_t>self.words.shape[0]
        for i in range(num_cells):
            self.free_cells[i] = num_cells - 1 - i
        self.cells_unordered = False

    cdef void free_cells_of(self, SlotRead read) noexcept:
        cdef int32_t i, top = self.num_free_cells
        if read.size == 0:
            return
        if top > 0 and self.free_cells[top - 1] < read.entries[read.size - 1].cell:
            self.cells_unordered = True
        for i in range(read.size - 1, -1, -1):
            self.free_cells[top] = read.entries[i].cell
            top += 1
        self.num_free_cells = top
        if self.cells_unordered and top == self.words.shape[0]:
            self.order_cells()

    cdef void quarantine(self, SlotRead read) noexcept:
        if not read.quarantined:
            read.quarantined = True
            self.quarantined_cells += read.size

    # Nobody wants the result of the READ any more. Before it is released it has to end.
    cdef void give_up(self, SlotRead read) noexcept:
        if self.release_is_final:
            read.phase = OVER
        else:
            read.phase = UNWANTED
            self.quarantine(read)

    # One state check (or the posting) said this.
    cdef int advance(
        self, SlotRead read, bint posting, state, error, double now, set verified, dict failed
    ) except -1:
        cdef bint wanted
        if error is None:
            # Whoever wraps NIXL's agent may forget to return what posting said.
            if state == "PROC" or state == "PEND" or (posting and state is None):
                if read.phase == RUNNING and now >= read.deadline:
                    self.fail_read(read, "the READ did not end in time", failed)
                    self.give_up(read)
                return 0
            if state == "DONE":
                wanted = read.phase == RUNNING
                read.phase = OVER
                if wanted:
                    self.judge(read, verified, failed)
                return 0
        if read.phase == RUNNING:
            self.fail_read(
                read, f"NIXL says {state!r}" if error is None else describe(error), failed
            )
            if posting and not not_found(error):
                # A post that failed half way may have left parts running.
                self.give_up(read)
                return 0
        if not_found(error) and not posting and not self.release_is_final:
            # The remote agent was removed meanwhile. That tells nothing about the bytes on the way.
            if read.phase != UNWANTED:
                self.give_up(read)
            return 0
        read.phase = OVER
        return 0

    cdef int judge(self, SlotRead read, set verified, dict failed) except -1:
        cdef int32_t i, request
        cdef Request* entry
        cdef Entry* place
        # The cells are read after the completion was seen, not before.
        kvnixl_observe_fence()
        for i in range(read.size):
            place = &read.entries[i]
            request = place.request
            entry = &self.requests[request]
            entry.unread -= 1
            if entry.stage == READING:
                if not kvnixl_cell_holds(&self.words[place.cell], place.nonce):
                    self.fail(
                        request,
                        f"engine {read.engine_id} rank {read.remote_rank} released the KV blocks "
                        "before the read completed",
                        failed,
                    )
                elif entry.unread == 0:
                    req_id = self.ids[request]
                    verified.add(req_id)
                    del self.index[req_id]
                    self.recycle_request(request)
            elif entry.unread == 0:
                self.recycle_request(request)
        return 0

    cdef int fail_read(self, SlotRead read, str cause, dict failed) except -1:
        cdef int32_t i, request
        cdef Request* entry
        cdef str reason = unreadable(read.engine_id, read.remote_rank, cause)
        for i in range(read.size):
            request = read.entries[i].request
            entry = &self.requests[request]
            entry.unread -= 1
            if entry.stage == READING:
                self.fail(request, reason, failed)
            elif entry.unread == 0:
                self.recycle_request(request)
        return 0

    cdef int release(self, SlotRead read, agent) except -1:
        try:
            agent.release_xfer_handle(read.handle)
        except Exception as exc:
            if not read.quarantined:
                self.messages.append(
                    f"the READ of lease slots of engine {read.engine_id} rank {read.remote_rank} "
                    f"could not be released and keeps {read.size} landing cells: {describe(exc)}"
                )
            self.quarantine(read)
            return 0
        read.handle = None
        return self.finish(read)

    cdef int finish(self, SlotRead read) except -1:
        read.phase = RELEASED
        if read.quarantined:
            read.quarantined = False
            self.quarantined_cells -= read.size
        self.free_cells_of(read)
        self.remotes[read.remote].num_reads -= 1
        return self.forget_remote(read.remote)

    # insides: growth

    cdef int32_t grow_checks(self) except NONE:
        cdef int32_t old = self.check_capacity, new = 2 * old if old else 256, i
        cdef Check* grown = <Check*>PyMem_Realloc(self.checks, new * sizeof(Check))
        if grown is NULL:
            raise MemoryError
        self.checks = grown
        self.check_capacity = new
        for i in range(old, new):
            grown[i].next = i + 1
        grown[new - 1].next = NONE
        self.free_check = old
        return old

    cdef int32_t grow_requests(self) except NONE:
        cdef int32_t old = self.request_capacity, new = 2 * old if old else 256, i
        cdef Request* grown = <Request*>PyMem_Realloc(self.requests, new * sizeof(Request))
        if grown is NULL:
            raise MemoryError
        self.requests = grown
        self.request_capacity = new
        self.ids.extend([None] * (new - old))
        for i in range(old, new):
            grown[i].stage = FREE
            grown[i].next = i + 1
        grown[new - 1].next = NONE
        self.free_request = old
        return old

    cdef int grow_remotes(self) except -1:
        cdef int32_t new = 2 * self.remote_capacity if self.remote_capacity else 16
        cdef Remote* grown = <Remote*>PyMem_Realloc(self.remotes, new * sizeof(Remote))
        if grown is NULL:
            raise MemoryError
        self.remotes = grown
        self.remote_capacity = new
        return 0


cdef class VerifierBase:
    """Makes an idle `step` of `kvnixl.leases.LeaseVerifier` cost next to nothing."""

    cdef public object _table  # a CheckTable

    def step(self, reads_done: object = ()) -> tuple:
        """Start the checks of requests whose block READs are done; return what ended.

        Args:
            reads_done: ids of the requests **all** of whose block READs have completed since the
                last call. Repeated ids are ignored while the request is being verified.

        Returns:
            ``(verified, failed)``: ids of the requests whose leases all held, and id -> reason of
            those to be recomputed. Each request is in one of them, once.
        """
        if not reads_done and not self._table.active:
            return (set(), {})
        return self._busy_step(reads_done)


# NIXL's exceptions live in a compiled module that differs per CUDA version, so the name tells.
cdef bint not_found(error) except -1:
    return error is not None and type(error).__name__ == "nixlNotFoundError"


def describe(error: object) -> str:
    """An exception as text. Never raises, whatever the exception's own ``__str__`` does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


cdef str unreadable(engine_id, rank, str cause):
    return f"the lease slot of engine {engine_id} rank {rank} could not be read: {cause}"
