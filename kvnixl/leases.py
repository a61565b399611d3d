"""Lease slots: prove after a read that the blocks were not reused while they were read.

A producer exports one 8-byte word per lease, its *slot*, which holds the lease's *nonce* as long as
the blocks stay put. A reader fetches the slot after its block READs are done: if the nonce is still
there, the blocks were not reused before the last byte was read.

* `LeaseSlotAllocator` lives with the producer's scheduler and hands out slots and nonces.
* `ProducerLeaseSlots` lives with each producer worker and holds the words.
* `LeaseVerifier` lives with each reader and checks the leases of the requests it has read.

Why this proves it, what it needs and how each failure ends: ``docs/protocol.md``.

Nothing here starts a thread, reads the environment or waits. An object is used from one thread at a
time.
"""

from __future__ import annotations

import logging
import math
import mmap
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvnixl._fence import revoke_fence
from kvnixl._slots import CheckTable, SlotPool, SlotRead, SlotWriter, VerifierBase, describe
from kvnixl.errors import ClosedError
from kvnixl.metadata import MAX_LEASE_SLOTS

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

logger = logging.getLogger(__name__)

__all__ = [
    "DEFAULT_NUM_CELLS",
    "DEFAULT_TIMEOUT_S",
    "LEASE_SLOT_BYTES",
    "LeaseSlotAllocator",
    "LeaseVerifier",
    "ProducerLeaseSlots",
    "SlotReadAgent",
    "lease_slot_descs",
]

LEASE_SLOT_BYTES = 8
DEFAULT_NUM_CELLS = 4096
DEFAULT_TIMEOUT_S = 10.0
# How long it is not said again that no slot is free.
_FULL_QUIET_S = 60.0

# Exceptions of making a READ that no READ to the same peer can avoid.
_PEER_IS_GONE = ("nixlNotFoundError", "nixlRemoteDisconnectError", "PeerDisconnectedError")

# NIXL indexes descriptors with int32.
_MAX_WORDS = 2**31 - 1
_NONCE_LIMIT = 2**63


def lease_slot_descs(base_addr: int, num_slots: int) -> npt.NDArray[np.uint64]:
    """Descriptors of ``num_slots`` slots (or landing cells), for ``prep_xfer_dlist``.

    Args:
        base_addr: address of the first word, 0 to 2**64-1.
        num_slots: how many words follow each other from there.

    Returns:
        uint64 array of shape ``(num_slots, 3)``, rows ``(address, 8, 0)``: address, bytes, device.

    Raises:
        ValueError: the words do not fit into 64-bit addresses.
    """
    if num_slots < 0:
        raise ValueError(f"num_slots must not be negative, not {num_slots}")
    if base_addr < 0 or base_addr + num_slots * LEASE_SLOT_BYTES > 2**64:
        raise ValueError(
            f"{num_slots} lease slots at address {base_addr:#x} do not fit into 64-bit addresses"
        )
    descs = np.zeros((num_slots, 3), dtype=np.uint64)
    descs[:, 0] = np.uint64(base_addr)
    descs[:, 0] += np.arange(num_slots, dtype=np.uint64) * np.uint64(LEASE_SLOT_BYTES)
    descs[:, 1] = LEASE_SLOT_BYTES
    return descs


def _allocate_words(num_words: int, name: str) -> npt.NDArray[np.int64]:
    """Zeroed words on pages of their own.

    The mapping is shared, so that a fork makes neither side copy pages that a NIC has pinned.
    """
    if not 0 < num_words <= _MAX_WORDS:
        raise ValueError(f"{name} must be in 1 to 2**31-1, not {num_words}")
    memory = mmap.mmap(-1, num_words * LEASE_SLOT_BYTES)
    return np.frombuffer(memory, dtype=np.int64, count=num_words)


class _Words:
    """Words that a NIXL agent registers, as an array, as a tensor and as an address."""

    words: npt.NDArray[np.int64]

    @property
    def base_addr(self) -> int:
        """Address of the first word."""
        return int(self.words.ctypes.data)

    @property
    def tensor(self) -> torch.Tensor:
        """The same memory as an int64 CPU tensor. Needs torch."""
        import torch

        return torch.from_numpy(self.words)


class LeaseSlotAllocator(SlotPool):
    """Slots and nonces of one producer engine, on its scheduler's side.

    All workers of the engine use the same slot and nonce for a request. What changed since the last
    step goes to them with `take_updates`; they apply it with `ProducerLeaseSlots.update`, which
    takes the clears first, as it applies them::

        to_arm, to_clear = allocator.take_updates()
        slots.update(to_clear, to_arm)

    A slot is free again as soon as its lease is released, also for an arm in the same step: workers
    apply the clears of a step before its arms. A request that is released and acquired again gets
    a new nonce. Within one step that means:

    * the first lease was never sent: only the new one is armed, nothing is cleared;
    * it was sent and released with ``clear=True``: the request is in both sets, a worker clears the
      old word and arms the new one;
    * it was sent and released with ``clear=False``: the request is only armed; a worker takes its
      own old lease of that request back when it arms the new one.

    Args:
        num_slots: slots that every worker of the engine exports (option ``kv_lease_slots``).
        clock: seconds, monotonic; only differences count.
    """

    def __init__(self, num_slots: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not 0 < num_slots <= MAX_LEASE_SLOTS:
            raise ValueError(
                f"num_slots (option kv_lease_slots) must be in 1 to {MAX_LEASE_SLOTS}, "
                f"not {num_slots}"
            )
        super().__init__(num_slots, 1 + secrets.randbelow(_NONCE_LIMIT - 1))
        self._clock = clock
        self._quiet_until = -math.inf

    def when_full(self) -> bool:
        """Say that requests go without a lease: once until half of the slots are free again, and
        not more often than every minute."""
        now = self._clock()
        if now < self._quiet_until:
            return False
        self._quiet_until = now + _FULL_QUIET_S
        logger.error(
            "all %d lease slots are in use: requests go without a lease and readers cannot "
            "verify them; raise kv_lease_slots",
            self.num_slots,
        )
        return True


class ProducerLeaseSlots(_Words):
    """The slot words of one producer worker.

    The owner registers the memory with NIXL and gives ``base_addr`` and ``num_slots`` to readers::

        slots = ProducerLeaseSlots(4096)
        registration = agent.register_memory(
            [(slots.base_addr, slots.num_slots * LEASE_SLOT_BYTES, 0, "")], mem_type="DRAM"
        )

    In every step, before any block that was released may be written again::

        slots.update(to_clear, to_arm)  # to_arm, to_clear = LeaseSlotAllocator.take_updates()
        for req_id in sent:             # leases whose blocks this worker is about to release
            slots.clear(req_id)
        slots.publish()                 # from here on the blocks may be reused

    Args:
        num_slots: how many slots to export.

    Attributes:
        words: the slots, int64 array of shape ``(num_slots,)``; 0 is empty. Written only by this
            object.
    """

    def __init__(self, num_slots: int) -> None:
        self.words = _allocate_words(num_slots, "num_slots")
        self.num_slots = num_slots
        self.closed = False
        self._writer = SlotWriter(self.words)

    def nonce(self, req_id: str) -> int | None:
        """The nonce that was armed for the request, or ``None`` when it holds no lease here."""
        return self._writer.nonce(req_id)

    def update(self, to_clear: Iterable[str], to_arm: Mapping[str, tuple[int, int]]) -> None:
        """Apply one step of the scheduler: clears first, then arms. `publish` makes it visible.

        Args:
            to_clear: request ids; unknown ones are ignored.
            to_arm: request id -> ``(slot, nonce)``. A request that holds a lease loses it.

        Raises:
            IndexError: a slot is outside 0 to ``num_slots - 1``.
            ValueError: a nonce is outside 1 to 2**63-1.
            ClosedError: after `close`, when there is something to arm.
        """
        if self.closed:
            if to_arm:
                raise ClosedError("update: the lease slots were closed")
            return
        self._writer.update(to_clear, to_arm if type(to_arm) is dict else dict(to_arm))

    def clear(self, req_id: str) -> None:
        """End the request's lease. Unknown requests are ignored.

        Its blocks may be reused after the next `publish`, not before. A lease whose slot a later
        one has taken is over already; that one stays. An arm that is still to come is not undone.
        """
        self._writer.clear(req_id)

    def publish(self) -> None:
        """Make every store so far visible to every reader: one full fence, none if nothing changed.

        Blocks whose leases were cleared may be reused from here on.
        """
        if self._writer.dirty:
            revoke_fence()
            self._writer.mark_clean()

    def close(self) -> None:
        """End all leases. Closing twice is fine.

        The memory itself goes with the last reference to `words` or `tensor`; deregister it from
        NIXL first.
        """
        if self.closed:
            return
        self.closed = True
        self.words[:] = 0
        revoke_fence()
        self._writer = SlotWriter(self.words)


class SlotReadAgent(Protocol):
    """NIXL calls that `LeaseVerifier` makes. A raw ``nixl_agent``, `kvnixl.agent.Agent` and
    `kvnixl.fake.FakeAgent` have them; handles may be any objects. A ``transfer`` that returns None
    has started the READ, whose state is asked for in every step anyway.

    With ``register_memory``, ``deregister_memory`` and ``prep_xfer_dlist`` as well, the verifier
    registers and prepares its landing cells itself.
    """

    def make_prepped_xfer(
        self,
        operation: Any,
        local_xfer_side: Any,
        local_indices: Any,
        remote_xfer_side: Any,
        remote_indices: Any,
    ) -> Any: ...
    def transfer(self, handle: Any) -> Any: ...
    def check_xfer_state(self, handle: Any) -> Any: ...
    def release_xfer_handle(self, handle: Any) -> Any: ...
    def release_dlist_handle(self, handle: Any) -> Any: ...


def _release_is_final(nixl_agent: Any) -> bool:
    """Whether a READ writes nothing more once releasing it succeeded. NIXL does not promise it."""
    declared = getattr(nixl_agent, "release_is_final", None)
    if isinstance(declared, bool):
        return declared
    classes = [*type(nixl_agent).__mro__, *type(getattr(nixl_agent, "agent", None)).__mro__]
    return not any(cls.__module__.split(".")[0].startswith("nixl") for cls in classes)


# Verifiers that were shut down while a READ could still write their landing cells.
_unfinished: list[LeaseVerifier] = []


class LeaseVerifier(_Words, VerifierBase):
    """Checks, after the block READs of a request, that its leases still hold.

    Per request: `add_checks` (or `add_check`) for every remote rank that is read, before its block
    READs end; then ``step({req_id})`` once **all** of them are done, and ``step()`` until the
    request is in one of the two results. The slots of all requests of a step are fetched with one
    READ per remote rank. What does not prove the lease fails the request, with a reason.

    The verifier owns landing cells, one per check in flight. A READ that NIXL has not ended keeps
    its cells, whatever becomes of its requests: NIXL reports it as released and still writes them.
    Such cells, and those of a READ that NIXL refuses to release, are *quarantined*: out of use,
    tried again in every step, back as soon as that succeeds. An agent whose release call does end
    a READ says so with an attribute ``release_is_final = True``; one that is not NIXL's and says
    nothing is taken at its word.

    With ``register=True`` the landing cells are registered and prepared in the constructor when
    the agent has the calls for it, and `shutdown` takes that back. A caller that does both itself
    passes ``register=False`` and assigns ``local_handle``. The verifier owns the prepared lists it
    is given, ``local_handle`` and those of `add_remote`, and releases them; registrations that it
    did not make stay the caller's.

    Args:
        nixl_agent: see `SlotReadAgent`.
        num_cells: landing cells; a request with more checks than that cannot be verified.
        timeout: seconds that a READ may take, and that a request may wait for landing cells.
        clock: seconds, monotonic; only differences count.
        register: register and prepare the landing cells here.
        completion_notif: called once per READ with the engine id, the rank and the ids of the
            requests that the READ serves; what it returns is sent to that rank by NIXL when the
            slots have been fetched (empty: nothing). Thus an owner that ends leases on notification
            cannot end one between a block READ and its check.

    Attributes:
        words: the landing cells, int64 array of shape ``(num_cells,)``.
        local_handle: the prepared list of the landing cells (`lease_slot_descs` of ``base_addr``).
    """

    def __init__(
        self,
        nixl_agent: SlotReadAgent,
        num_cells: int = DEFAULT_NUM_CELLS,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        register: bool = True,
        completion_notif: Callable[[str, int, list[str]], bytes] | None = None,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, not {timeout}")
        self.words = _allocate_words(num_cells, "num_cells")
        self.num_cells = num_cells
        self.local_handle: Any = None
        self.closed = False
        self._agent = nixl_agent
        self._timeout = timeout
        self._clock = clock
        self._completion_notif = completion_notif
        self._table = CheckTable(self.words, _release_is_final(nixl_agent))
        self._prepared: Any = None
        self._registration: Any = None
        # Prepared lists that NIXL refused to release, by id; `CheckTable` keeps the lists alive.
        self._refused_lists: set[int] = set()
        if register:
            self._register_cells()

    def _register_cells(self) -> None:
        register_memory = getattr(self._agent, "register_memory", None)
        prep_xfer_dlist = getattr(self._agent, "prep_xfer_dlist", None)
        if register_memory is None or prep_xfer_dlist is None:
            return
        region = np.array([[self.base_addr, self.words.nbytes, 0]], dtype=np.uint64)
        self._registration = register_memory(region, mem_type="DRAM")
        try:
            self._prepared = self.local_handle = prep_xfer_dlist(
                "NIXL_INIT_AGENT", lease_slot_descs(self.base_addr, self.num_cells), mem_type="DRAM"
            )
        except BaseException:
            self._deregister_cells()
            raise

    # remotes

    def add_remote(
        self, engine_id: str, remote_rank: int, handle: Any, num_slots: int | None = None
    ) -> None:
        """Make the slots of a remote rank known. An earlier rank of that name is released.

        Args:
            engine_id: the remote engine.
            remote_rank: the rank of the worker that exports the slots.
            handle: prepared list of its slots (`lease_slot_descs` of its address and number).
            num_slots: how many the list has. Checks of a slot beyond it fail alone; without the
                number NIXL refuses the whole READ and it is made again in halves.

        Raises:
            ClosedError: after `shutdown`.
        """
        if self.closed:
            raise ClosedError("add_remote: the lease verifier was shut down")
        self._table.add_remote(
            engine_id, remote_rank, handle, _MAX_WORDS if num_slots is None else num_slots
        )
        self._tidy()

    def can_verify(self, engine_id: str, ranks: Iterable[int]) -> bool:
        """Whether the slots of all these ranks of the engine are known.

        Of a known engine no ranks are all known; a request that is checked with none of them fails
        all the same.
        """
        return self._table.knows(engine_id, ranks)

    def busy_engines(self) -> set[str]:
        """Engines that a check without result or an unreleased READ refers to.

        Releasing such an engine fails its checks. Do not remove its NIXL agent: NIXL then reports
        READs as ended whose bytes may still land.
        """
        return self._table.busy_engines()

    def release_engine(self, engine_id: str) -> None:
        """Forget the engine and release its prepared lists, once no READ uses them.

        Requests with a check of that engine fail: those that are being verified in the next `step`,
        the others when their block READs are done. Unknown engines are ignored.
        """
        self._table.close_engine(engine_id)
        self._tidy()

    # checks

    @property
    def has_checks(self) -> bool:
        """Whether any request waits for its outcome."""
        return self._table.has_checks

    @property
    def quarantined_cells(self) -> int:
        """Landing cells out of use because NIXL may still write them."""
        return self._table.quarantined_cells

    @property
    def free_cells(self) -> int:
        """Landing cells that no READ holds."""
        return self._table.num_free_cells

    def add_check(
        self, req_id: str, engine_id: str, remote_rank: int, slot: int, nonce: int
    ) -> None:
        """Add one check: `add_checks` of one rank."""
        self._table.add_checks(req_id, engine_id, (remote_rank,), slot, nonce)

    def add_checks(
        self, req_id: str, engine_id: str, ranks: Iterable[int], slot: int, nonce: int
    ) -> None:
        """The request reads blocks of these ranks under the lease ``(slot, nonce)``.

        May be called several times for a request that reads several engines. Numbers out of range
        and unknown ranks are not refused here: the request will fail.

        Raises:
            ValueError: the request is being verified, or its outcome was not collected yet;
                `discard` it first.
        """
        self._table.add_checks(req_id, engine_id, ranks, slot, nonce)

    def discard(self, req_id: str) -> None:
        """Forget the request, at any stage: it will not be reported, and its id may be used anew.

        Landing cells of a READ in flight stay with it until it ends.
        """
        self._table.discard(req_id)

    def _busy_step(self, reads_done: Iterable[str]) -> tuple[set[str], dict[str, str]]:
        """`step` when there is something to do."""
        verified: set[str] = set()
        failed: dict[str, str] = {}
        table = self._table
        now = self._clock()
        for read in table.step(self._agent, reads_done, now, self._timeout, verified, failed):
            self._post(read, now, verified, failed)
        if table.has_leftovers:
            self._tidy()
        return verified, failed

    def _post(self, read: SlotRead, now: float, verified: set[str], failed: dict[str, str]) -> None:
        """Make and post one READ. Its requests fail when that is not possible, nothing raises."""
        table, agent = self._table, self._agent
        try:
            if self._completion_notif is None:
                handle = agent.make_prepped_xfer(
                    "READ", self.local_handle, read.cells, read.remote_handle, read.slots
                )
            else:
                handle = self._make_with_notif(read, self._completion_notif)
            if handle is None:
                raise RuntimeError("make_prepped_xfer returned nothing")
        except Exception as exc:
            if len(read) > 1 and type(exc).__name__ not in _PEER_IS_GONE:
                # One bad index makes NIXL refuse the whole READ; the other requests are innocent.
                for part in table.split(read):
                    self._post(part, now, verified, failed)
            else:
                table.drop(read, describe(exc), failed)
            return
        table.track(read, handle)
        state: Any = None
        error: Exception | None = None
        try:
            state = agent.transfer(handle)
        except Exception as exc:
            error = exc
        table.posted(read, state, error, agent, now, verified, failed)

    def _make_with_notif(
        self, read: SlotRead, completion_notif: Callable[[str, int, list[str]], bytes]
    ) -> Any:
        notif = completion_notif(read.engine_id, read.remote_rank, self._table.requests_of(read))
        return self._agent.make_prepped_xfer(
            "READ",
            self.local_handle,
            read.cells,
            read.remote_handle,
            read.slots,
            **({"notif_msg": notif} if notif else {}),
        )

    def _tidy(self) -> None:
        """Log what went wrong and release the prepared lists that no READ uses any more."""
        for message in self._table.take_messages():
            logger.warning("%s", message)
        for handle in self._table.take_closed_handles():
            if self._release_list(handle, said=id(handle) in self._refused_lists):
                self._refused_lists.discard(id(handle))
            else:
                self._refused_lists.add(id(handle))
                self._table.return_closed_handle(handle)

    # ending

    def _release_list(self, handle: Any, *, said: bool = False) -> bool:
        try:
            self._agent.release_dlist_handle(handle)
        except Exception as exc:
            if not said:
                logger.warning(
                    "a prepared list of lease slots could not be released and will be tried again "
                    "in every step: %s",
                    describe(exc),
                )
            return False
        return True

    def shutdown(self) -> int:
        """Forget all requests and give back what NIXL holds: READs, prepared lists, registration.

        Does not wait. While a READ is in flight (see `busy_engines`; ``step()`` ends them) the
        cells stay registered and allocated, because NIXL may still write them; the log says how
        many. Calling it again tries again.

        Returns:
            How many landing cells are left in quarantine; if none, how many kinds of other things
            NIXL refused to take back. 0 when everything was given back.
        """
        self.closed = True
        table = self._table
        table.close_all()
        table.step(self._agent, (), self._clock(), self._timeout, set(), {})
        self._tidy()
        left = self.quarantined_cells
        if left:
            if self not in _unfinished:
                _unfinished.append(self)
            logger.error(
                "%d landing cells for lease slots are still in use by NIXL; they stay registered "
                "and allocated until a later shutdown() finds them free",
                left,
            )
            return left
        if self in _unfinished:
            _unfinished.remove(self)
        if self.local_handle is self._prepared:
            self.local_handle = None
        if self.local_handle is not None and self._release_list(self.local_handle):
            self.local_handle = None
        if self._prepared is not None and self._release_list(self._prepared):
            self._prepared = None
        if self._prepared is None:
            self._deregister_cells()
        kept = (self.local_handle, self._prepared, self._registration)
        return table.has_leftovers + sum(owned is not None for owned in kept)

    def _deregister_cells(self) -> None:
        if self._registration is None:
            return
        try:
            self._agent.deregister_memory(self._registration)  # type: ignore[attr-defined]
        except Exception as exc:
            logger.warning("the landing cells could not be deregistered: %s", describe(exc))
        else:
            self._registration = None
