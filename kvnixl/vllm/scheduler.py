"""The scheduler's half: which requests are read, which are promised, and what ends that.

A request is on the *consumer* side when its ``kv_transfer_params`` say ``do_remote_prefill``, and
on the *producer* side when they say ``do_remote_decode``.

Consumer. From the moment a request is known its lease is kept alive by heartbeats. It ends in
exactly one of these ways: it is read by the workers (``WAITING_FOR_REMOTE_KVS`` until they report
it), or it is computed here and its producer is told that the blocks are not needed (a full local
hit, less missing than ``kv_recompute_threshold``, aborted or rejected before it was scheduled).
A reference to the blocks of another prompt is neither read nor given back, because it is not this
request's: vLLM's completions API, for one, gives all prompts of a batch the reference of the first.
Of requests with the same reference, such as the samples of one prompt (``n`` > 1), one is read: its
end ends the lease. The others wait for it, and then compute what the prefix cache does not hold.

Producer. A request gets its lease in the step whose forward pass computes the end of its prompt:
the workers write the lease slot before that pass, so no reader can ask earlier than that. A request
that is preempted, aborted, or otherwise finished without a reader loses it in the next step, again
before the forward pass that may write its blocks.
"""

from __future__ import annotations

import enum
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvnixl.errors import TransferParamsError
from kvnixl.handshake import HandshakeServer
from kvnixl.heartbeat import HeartbeatTracker
from kvnixl.leases import LeaseSlotAllocator
from kvnixl.metadata import PromptDigest, TransferParams
from kvnixl.producer import transfer_reference
from kvnixl.vllm.adapter import EngineFacts, GroupFacts, transfer_blocks
from kvnixl.vllm.messages import (
    KvNixlConnectorMetadata,
    KvNixlHandshakeMetadata,
    KvNixlWorkerMetadata,
    ReadRequest,
)
from kvnixl.vllm.options import ConnectorOptions
from kvnixl.vllm.stats import KvNixlStats, PullDecision, StatsCollector

__all__ = ["KvNixlScheduler"]

logger = logging.getLogger(__name__)

# Finished normally: whoever asked for the prefill will read it. Anything else ends the request.
_HANDED_OVER = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
# vLLM's id of the block that stands for those that a sliding window has passed.
_NULL_BLOCK = 0


class _State(enum.Enum):
    KNOWN = enum.auto()
    """Not scheduled yet."""
    READING = enum.auto()
    """The workers read it; the scheduler waits for them."""
    OVER = enum.auto()
    """Read, failed, or given back: its producer knows, or will, without this side."""


@dataclass(slots=True, eq=False)
class _Shared:
    """What the requests with one reference have in common."""

    key: tuple[object, ...]
    prompt: list[int] | None  # of the first, if it is known
    members: set[str] = field(default_factory=set)
    open: set[str] = field(default_factory=set)  # KNOWN or READING
    being_read: bool = False
    over: bool = False  # its producer knows, or will, that the blocks are not needed any more


@dataclass(slots=True, eq=False)
class _Pull:
    """A request whose blocks another engine holds."""

    reference: dict[str, Any]
    engine_id: str | None  # None: the reference is unusable, and the workers will say why
    state: _State = _State.KNOWN
    num_computed_tokens: int = 0  # that the local prefix cache holds
    shared: _Shared | None = None


def _reference_key(parsed: TransferParams) -> tuple[object, ...]:
    """The same for requests that would read the same blocks from the same place."""
    engine = (parsed.remote_engine_id, parsed.remote_host, parsed.remote_port)
    return (*engine, parsed.remote_request_id, parsed.kvnixl_lease)


def _is_other_prompt(prompt: list[int] | None, parsed: TransferParams, shared: _Shared) -> bool:
    """Whether the blocks are known to be another prompt's."""
    if prompt is None:
        return False
    if parsed.prompt is not None:
        return not parsed.prompt.begins(prompt)
    # A stock producer does not say whose they are: the first one's, then.
    return shared.prompt is not None and shared.prompt != prompt


class KvNixlScheduler:
    """Scheduler side of the connector.

    Args:
        facts: of this engine's configuration.
        groups: the cache groups that are transferred.
        options: the user's.
        clock: seconds; the clock that the side channel sends to peers.
    """

    def __init__(
        self,
        facts: EngineFacts,
        groups: Sequence[GroupFacts],
        options: ConnectorOptions,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._facts = facts
        self._groups = groups
        self._options = options
        self._clock = clock
        # Microseconds, and so larger than before after a restart, as vLLM 0.33 expects it.
        self._generation = time.time_ns() // 1000
        self._server: HandshakeServer | None = None
        # consumer
        self._pulls: dict[str, _Pull] = {}
        self._shared: dict[tuple[object, ...], _Shared] = {}
        self._heartbeats = HeartbeatTracker(options.kv_lease_duration)
        self._reads: dict[str, ReadRequest] = {}
        self._aborts: set[str] = set()
        self._workers_busy = False
        # producer
        self._leases: LeaseSlotAllocator | None = None
        if facts.produces and options.kv_lease_slots:
            self._leases = LeaseSlotAllocator(options.kv_lease_slots)
        self._prefills: dict[str, Any] = {}  # vLLM's requests that have no lease yet
        self._leased: dict[str, Any] = {}  # and those that have, until they finish
        self._to_send: dict[str, float] = {}
        self._not_sent: set[str] = set()
        self._said: set[str] = set()
        self._stats = StatsCollector(f"{facts.engine_id}/scheduler", is_rank=False)

    # --- start and end --------------------------------------------------------------------------

    def set_handshake_metadata(
        self, metadata: dict[tuple[int, int], KvNixlHandshakeMetadata]
    ) -> None:
        """Serve what the workers export, by (pipeline rank, tensor rank)."""
        if not self._facts.produces:
            return
        payloads = {rank: exported.payload for rank, exported in metadata.items()}
        if self._server is not None:
            self._server.publish(payloads)
            return
        server = HandshakeServer(**self._options.server_arguments(), clock=self._clock)
        server.start(payloads)
        self._server = server
        logger.info(
            "kvnixl serves handshakes of engine %s at %s:%d",
            self._facts.engine_id,
            *server.address,
        )

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    # --- consumer -------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request arrived. It may wait for long before it is scheduled."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        req_id = request.request_id
        if not self._facts.consumes:
            self._say_once(
                "role",
                "Request %r asks for a remote prefill, but kv_role is kv_producer: it is computed "
                "here. Set kv_role to kv_consumer or kv_both to read from other engines.",
                req_id,
            )
            return
        pull = self._pulls[req_id] = _Pull(dict(params), None)
        try:
            parsed = TransferParams.parse(params, req_id)
            pull.engine_id = parsed.remote_engine_id
        except TransferParamsError as error:
            logger.debug("request %r: %s", req_id, error)
            return
        key = _reference_key(parsed)
        prompt = request.prompt_token_ids
        if getattr(request, "abort_immediately", False):
            prompt = None  # vLLM's front end refused it, and sends a placeholder for its prompt
        shared = self._shared.get(key) or _Shared(key, prompt)
        if _is_other_prompt(prompt, parsed, shared):
            pull.state = _State.OVER
            self._decide(req_id, "other_prompt")
            self._say_once(
                "prompt",
                "Request %r has the kv_transfer_params of another prompt: it is computed here. The "
                "router must send prefill and decode the same prompt, one per request. The metric "
                "vllm:kvnixl_pull_decisions_total says how often this happens.",
                req_id,
            )
            return
        self._shared[key] = shared
        pull.shared = shared
        shared.members.add(req_id)
        shared.open.add(req_id)
        self._heartbeats.start(req_id, parsed, self._clock())

    def num_matched_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """Tokens to pull beyond ``num_computed_tokens``; 0 to compute the rest here; ``None`` to be
        asked again later.

        May be called several times before the request gets its blocks.
        """
        pull = self._pulls.get(request.request_id)
        if pull is None or pull.state is not _State.KNOWN:
            return 0
        pull.num_computed_tokens = num_computed_tokens
        missing: int = request.num_prompt_tokens - num_computed_tokens
        # vLLM computes the last prompt token in any case, to sample the next one.
        if missing <= 1 or missing < self._options.kv_recompute_threshold:
            return 0
        if self._at_window_edge(request.num_prompt_tokens):
            return 0
        if pull.shared is not None:
            if pull.shared.over:
                return 0
            if pull.shared.being_read:
                return None
        return missing

    def _at_window_edge(self, num_tokens: int) -> bool:
        """Whether the last token of a prompt of that length cannot be computed after a read.

        Both engines keep of a window what the token *after* the prompt attends to, but vLLM then
        computes the last token of the prompt once more. That attends to one token before those, and
        whenever that one ends a block, neither engine has it any more.
        """
        return any(
            num_tokens >= group.sliding_window > 0
            and (num_tokens - group.sliding_window + 1) % group.block_size == 0
            for group in self._groups
        )

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request got its blocks: read them, or let its producer have its own back."""
        params = request.kv_transfer_params
        if not params:
            return
        req_id = request.request_id
        if params.get("do_remote_decode") and self._facts.produces:
            self._prefills[req_id] = request
        pull = self._pulls.get(req_id)
        if pull is None or pull.state is not _State.KNOWN:
            return
        if num_external_tokens > 0:
            self._decide(req_id, "pull" if pull.engine_id is not None else "refused")
            pull.state = _State.READING
            if pull.shared is not None:
                pull.shared.being_read = True
            self._reads[req_id] = self._read_request(request, pull, blocks, num_external_tokens)
        else:
            missing = request.num_prompt_tokens - pull.num_computed_tokens
            if missing <= 1:
                self._decide(req_id, "local_hit")
            elif pull.shared is not None and pull.shared.over:
                self._decide(req_id, "already_read")
            elif self._at_window_edge(request.num_prompt_tokens):
                self._decide(req_id, "window_edge")
            elif missing < self._options.kv_recompute_threshold:
                self._decide(req_id, "below_threshold")
            else:
                self._decide(req_id, "not_taken")
            self._give_back(req_id, pull)

    def _decide(self, req_id: str, decision: PullDecision) -> None:
        self._stats.record_decision(decision)
        logger.debug("request %r with a remote prefill: %s", req_id, decision)

    def _read_request(
        self, request: Any, pull: _Pull, blocks: Any, num_external_tokens: int
    ) -> ReadRequest:
        # vLLM may take fewer tokens than it was offered.
        num_tokens = pull.num_computed_tokens + num_external_tokens
        reference = self._without_placeholders(pull)
        read = ReadRequest(reference, num_tokens=num_tokens, awaited=True)
        local, computed = [], []
        for group in self._groups:
            first, inside = divmod(pull.num_computed_tokens, group.block_size)
            if inside:
                read.refused = (
                    f"the local prefix cache holds {pull.num_computed_tokens} tokens, which is no "
                    f"whole number of blocks of {group.block_size}"
                )
                return read
            if group.sliding_window and num_tokens != request.num_prompt_tokens:
                # The producer's list of such a group ends with its last token.
                read.refused = (
                    f"{num_tokens} of {request.num_prompt_tokens} tokens are wanted, but only the "
                    f"window at the end of the prompt can be read"
                )
                return read
            wanted = blocks.blocks[group.index][first : -(-num_tokens // group.block_size)]
            if group.max_window_blocks:
                # vLLM computes the last token once more, whose window begins one token earlier.
                read.num_tokens = num_tokens - 1
                wanted = wanted[-group.max_window_blocks :]
            # A windowed group has placeholders where the window has passed.
            local.append([block.block_id for block in wanted if not block.is_null])
            computed.append(first)
        read.local_block_ids = tuple(local)
        read.num_computed_blocks = tuple(computed)
        return read

    def _without_placeholders(self, pull: _Pull) -> dict[str, Any]:
        """The reference without the placeholders of blocks that a window has left behind.

        A producer that went on after the prompt may list them where this engine needs a block.
        """
        reference = pull.reference
        listed = reference.get("remote_block_ids")
        if pull.engine_id is None or not listed or len(listed) != len(self._groups):
            return reference  # the workers say what is wrong with it
        kept = [
            list(itertools.dropwhile(lambda block: block == _NULL_BLOCK, ids))
            if group.sliding_window
            else ids
            for group, ids in zip(self._groups, listed, strict=True)
        ]
        return {**reference, "remote_block_ids": kept}

    def _give_back(self, req_id: str, pull: _Pull) -> None:
        """Have the producer told that nobody will read these blocks, if that is so."""
        pull.state = _State.OVER
        self._heartbeats.stop(req_id)
        shared = pull.shared
        if shared is not None:
            shared.open.discard(req_id)
            if shared.open or shared.over:
                return
            shared.over = True
        if pull.engine_id is not None:
            self._reads[req_id] = ReadRequest(pull.reference)

    def _read_ended(self, req_id: str, pull: _Pull) -> None:
        """The workers read the blocks, or failed, or will not go on: they tell the producer."""
        pull.state = _State.OVER
        self._heartbeats.stop(req_id)
        shared = pull.shared
        if shared is not None:
            shared.open.discard(req_id)
            shared.over = True
            for other in shared.open:
                self._heartbeats.stop(other)

    # --- a step ---------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> KvNixlConnectorMetadata:
        """What the workers have to do in this step."""
        now = self._clock()
        metadata = KvNixlConnectorMetadata()
        if self._leases is not None:
            self._lease_finished_prefills(scheduler_output)
            metadata.lease_arms, metadata.lease_clears = self._leases.take_updates()
        metadata.reads, self._reads = self._reads, {}
        metadata.reads_to_abort, self._aborts = self._aborts, set()
        metadata.reqs_to_send, self._to_send = self._to_send, {}
        metadata.reqs_not_processed, self._not_sent = self._not_sent, set()
        metadata.scheduler_clock = now
        metadata.heartbeat_by_engine = self._heartbeats.take_due(now)
        return metadata

    def _lease_finished_prefills(self, scheduler_output: Any) -> None:
        assert self._leases is not None
        for req_id in scheduler_output.preempted_req_ids or ():
            # Its blocks are free, and may be somebody else's in this very step.
            request = self._leased.pop(req_id, None)
            if request is not None:
                self._leases.release(req_id, clear=True)
                self._prefills[req_id] = request
        if not self._prefills:
            return
        scheduled = scheduler_output.num_scheduled_tokens
        for req_id, request in list(self._prefills.items()):
            count = scheduled.get(req_id)
            if count and request.num_computed_tokens + count >= request.num_prompt_tokens:
                self._leases.acquire(req_id)
                self._leased[req_id] = self._prefills.pop(req_id)

    def update_connector_output(self, output: Any) -> None:
        """What the workers reported, all of them."""
        failed = getattr(output, "failed_recving", None) or ()
        for req_id in output.finished_recving or ():
            pull = self._pulls.get(req_id)
            # A request that waits for its blocks; others are of another connector beside this one.
            if pull is not None and pull.state is _State.READING:
                self._read_ended(req_id, pull)
                if req_id not in failed and pull.engine_id is not None:
                    self._heartbeats.answered(pull.engine_id, self._clock())
        if self._leases is not None:
            for req_id in output.finished_sending or ():
                # The workers cleared the slot before they reported this.
                self._leases.release(req_id, clear=False)
        told = output.kv_connector_worker_meta
        self._workers_busy = False
        if isinstance(told, KvNixlWorkerMetadata):
            self._workers_busy = told.busy
            for engine_id in told.heard:
                self._heartbeats.answered(engine_id, self._clock())

    def take_stats(self) -> KvNixlStats | None:
        """What was counted since the last call; ``None`` if nothing was."""
        return self._stats.take()

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping although it has no request."""
        return self._workers_busy or bool(self._reads or self._aborts)

    # --- the end of a request -------------------------------------------------------------------

    def request_finished(
        self, request: Any, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over.

        Returns:
            Whether its blocks stay put until the workers report it as sent, and the parameters for
            whoever reads them.
        """
        req_id = request.request_id
        pull = self._pulls.pop(req_id, None)
        if pull is not None:
            if pull.state is _State.KNOWN:
                self._decide(req_id, "given_up")
                self._give_back(req_id, pull)
            elif pull.state is _State.READING:
                # vLLM keeps its blocks until the workers report it, which they do once nothing can
                # land in them any more.
                self._aborts.add(req_id)
                self._read_ended(req_id, pull)
            self._forget(req_id, pull)
        self._prefills.pop(req_id, None)
        self._leased.pop(req_id, None)
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode"):
            return False, None
        if not self._facts.produces:
            self._say_once(
                "consumer",
                "Request %r is to be decoded elsewhere, but kv_role is kv_consumer: its blocks are "
                "not kept. Set kv_role to kv_producer or kv_both.",
                req_id,
            )
            return False, None
        if request.status.name not in _HANDED_OVER:
            if self._leases is not None:
                self._leases.release(req_id, clear=True)
            self._not_sent.add(req_id)
            return False, None
        return self._offer(request, block_ids)

    def _forget(self, req_id: str, pull: _Pull) -> None:
        shared = pull.shared
        if shared is not None:
            shared.members.discard(req_id)
            if not shared.members:
                del self._shared[shared.key]

    def _offer(
        self, request: Any, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        req_id = request.request_id
        blocks = transfer_blocks(self._groups, block_ids)
        held = any(blocks)
        lease = None
        if self._leases is not None:
            if held:
                # Not acquire: workers would write a lease of now only in a later step, and a reader
                # that comes sooner would take the blocks for released.
                lease = self._leases.get(req_id)
                self._stats.record_lease(lease is not None)
            else:
                self._leases.release(req_id, clear=True)
        if held:
            self._to_send[req_id] = self._clock() + self._options.kv_lease_duration
        address = (self._options.advertised_host, self._options.side_channel_port)
        prompt = request.prompt_token_ids  # None if it came as embeddings
        return held, transfer_reference(
            engine_id=self._facts.engine_id,
            req_id=req_id,
            block_ids=blocks,
            num_tokens=request.num_computed_tokens if held else 0,
            address=address if self._server is None else self._server.address,
            expires_at=None,  # it moves with every heartbeat
            lease=lease,
            tp_size=self._facts.tp_size,
            registration_generation=self._generation,
            prompt=None if prompt is None else PromptDigest.of(prompt),
        )

    def _say_once(self, key: str, message: str, *args: object) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.warning(message, *args)
