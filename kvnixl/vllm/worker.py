"""The worker's half: vLLM's hooks of one rank, translated into `kvnixl.producer` and
`kvnixl.reader`.

vLLM calls, in every step::

    bind_connector_metadata   -> bind: before the forward pass, lease slots are cleared and written,
                                 and reads that ended since the last step are verified
    start_load_kv             -> start_load: reads begin, requests are held, heartbeats are sent
    get_transfer_results      -> finish_step: what ended
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvnixl.agent import Agent
from kvnixl.compat import CompatibilityCheck, compatibility_factors
from kvnixl.deadlines import rebase_deadline
from kvnixl.errors import KvNixlError
from kvnixl.handshake import HandshakeClient
from kvnixl.heartbeat import HeartbeatSender
from kvnixl.loglimit import LogLimiter
from kvnixl.metadata import HeartbeatInfo, NixlHandshakePayload
from kvnixl.outcomes import FailureCause, ReadOutcome, Stage
from kvnixl.producer import LeaseOutcome, Producer
from kvnixl.reader import Reader
from kvnixl.vllm.adapter import (
    EngineFacts,
    GroupFacts,
    KVConnectorTransferResults,
    attn_backend_name,
    cache_layout,
)
from kvnixl.vllm.messages import (
    KvNixlConnectorMetadata,
    KvNixlHandshakeMetadata,
    KvNixlWorkerMetadata,
    ReadRequest,
)
from kvnixl.vllm.options import ConnectorOptions
from kvnixl.vllm.stats import KvNixlStats, StatsCollector
from kvnixl.wire import encode_agent_metadata, encode_handshake_payload

__all__ = ["KvNixlWorker"]

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2.0

_REMEDIES = {
    FailureCause.REFERENCE: "the client or router must pass on the prefill's kv_transfer_params "
    "unchanged",
    FailureCause.PROMPT: "the router must send prefill and decode the same prompt, one per request",
    FailureCause.NOT_ALLOWED: "add the host to allowed_peers if it is one of yours",
    FailureCause.HANDSHAKE: "check that the prefill engine runs, that its side channel is "
    "reachable from here, and that both run the same configuration",
    FailureCause.BLOCKS: "check that the kv_transfer_params belong to this prompt",
    FailureCause.NO_LEASE: "raise kv_lease_slots of the prefill engine, or read without proof by "
    "setting lease_verification to prefer",
    FailureCause.POST: "see the NIXL and UCX lines above",
    FailureCause.TRANSFER: "see the NIXL and UCX lines above",
    FailureCause.DISCONNECTED: "the prefill engine ended or was restarted",
    FailureCause.LEASE_ENDED: "if the lease ends before reads do again and again, raise "
    "kv_lease_duration of the prefill engine",
    FailureCause.TIMEOUT: "check the network, or raise the timeout",
}


class KvNixlWorker:
    """Worker side of the connector, for one rank.

    Nothing that a peer or a client sends raises out of the methods of a step: it fails requests.

    Args:
        vllm_config: vLLM's configuration.
        facts: what the connector needs of it.
        groups: the cache groups that are transferred.
        options: the user's.
        tp_rank: this rank.
    """

    def __init__(
        self,
        vllm_config: Any,
        facts: EngineFacts,
        groups: Sequence[GroupFacts],
        options: ConnectorOptions,
        tp_rank: int,
    ) -> None:
        self._vllm_config = vllm_config
        self._facts = facts
        self._groups = groups
        self._options = options
        self._tp_rank = tp_rank
        self._agent: Agent | None = None
        self._producer: Producer | None = None
        self._reader: Reader | None = None
        self._handshakes: HandshakeClient | None = None
        self._heartbeats: HeartbeatSender | None = None
        self._stats = StatsCollector(f"{facts.engine_id}/{tp_rank}")
        self._payload: KvNixlHandshakeMetadata | None = None
        self._received: set[str] = set()  # over, to be reported
        self._failed: set[str] = set()  # of those, the ones whose blocks are worth nothing
        self._refused: list[ReadOutcome] = []  # of what never reached the reader
        self._heard: set[str] = set()
        self._was_busy = False
        self._warnings = LogLimiter(logger, clock=time.monotonic)
        self._kv_caches: Mapping[str, Any] = {}

    # --- start and end --------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Register vLLM's cache tensors with NIXL.

        Raises:
            KvNixlError: the tensors cannot be cut into blocks, or NIXL does not start or refuses
                the memory.
        """
        facts, options = self._facts, self._options
        layout = cache_layout(self._vllm_config, self._groups, kv_caches)
        logger.info("kvnixl rank %d of engine %s\n%s", self._tp_rank, facts.engine_id, layout)
        compat = CompatibilityCheck(
            compatibility_factors(self._vllm_config, attn_backend_name(self._vllm_config)),
            **options.compat_arguments(),
        )
        if self._tp_rank == 0:
            logger.info("kvnixl compatibility factors: %s", compat.factors_text)
        self._kv_caches = kv_caches
        agent = self._agent = Agent.open(**options.agent_arguments())
        try:
            if facts.produces:
                self._producer = Producer(
                    agent,
                    layout,
                    engine_id=facts.engine_id,
                    factors=compat.factors_text,
                    **options.producer_arguments(),
                )
                metadata = encode_agent_metadata(self._producer.metadata())
                self._payload = KvNixlHandshakeMetadata(
                    encode_handshake_payload(NixlHandshakePayload(compat.hash, metadata))
                )
            if facts.consumes:
                self._handshakes = HandshakeClient(compat, **options.client_arguments())
                reader = self._reader = Reader(
                    agent,
                    layout,
                    engine_id=facts.engine_id,
                    handshakes=self._handshakes,
                    tp_rank=self._tp_rank,
                    tp_size=facts.tp_size,
                    register=self._producer is None,
                    **options.reader_arguments(),
                )
                self._heartbeats = HeartbeatSender(
                    options.kv_lease_duration,
                    agent.send_notif,
                    sender=reader.sender,
                    next_sequence=reader.next_sequence,
                )
        except BaseException:
            self.shutdown()
            raise

    def handshake_metadata(self) -> KvNixlHandshakeMetadata | None:
        """What this rank exports; ``None`` if nobody reads from it."""
        return self._payload

    def shutdown(self) -> None:
        """Revoke every lease, and give everything back that NIXL and ZeroMQ hold."""
        producer = self._producer
        if producer is not None:
            # First, so that readers which still read notice that the blocks go away.
            for req_id in producer.held_requests():
                producer.abort(req_id)
            producer.step()
        if self._reader is not None:
            left = self._reader.close(_CLOSE_TIMEOUT_S)
            if left:
                logger.warning("%d transfers were still in flight at shutdown", left)
        if producer is not None:
            # Last, for our own reads land in the memory that it has registered.
            producer.close()
        if self._handshakes is not None:
            self._handshakes.close()
        if self._agent is not None:
            quarantined = self._agent.close()
            if quarantined:
                logger.warning("%d NIXL objects could not be given back at shutdown", quarantined)
        self._producer = self._reader = self._handshakes = self._heartbeats = self._agent = None

    # --- a step ---------------------------------------------------------------------------------

    def bind(self, metadata: KvNixlConnectorMetadata) -> None:
        """Before the forward pass, which may write blocks whose leases end in this step."""
        if self._producer is not None and (metadata.lease_clears or metadata.lease_arms):
            self._producer.update(metadata.lease_clears, metadata.lease_arms)
        if self._reader is not None and self._reader.num_requests:
            # A READ that ended since the last step is followed by that of its lease slot, which
            # then takes place during this step's forward pass, not during the next one's.
            self._step_reader(self._reader)

    def start_load(self, metadata: KvNixlConnectorMetadata) -> None:
        """Begin what the scheduler asks for."""
        if self._producer is not None:
            self._hold(self._producer, metadata)
        reader = self._reader
        if reader is None:
            return
        for req_id, read in metadata.reads.items():
            self._start_read(reader, req_id, read)
        for req_id in metadata.reads_to_abort:
            reader.abort(req_id)
        if metadata.heartbeat_by_engine:
            self._send_heartbeats(reader, metadata.heartbeat_by_engine)
        if metadata.reads:
            self._step_reader(reader)

    def _hold(self, producer: Producer, metadata: KvNixlConnectorMetadata) -> None:
        for req_id in metadata.reqs_not_processed:
            producer.abort(req_id)
        for req_id, deadline in metadata.reqs_to_send.items():
            # Clocks of two processes do not compare; what is left does.
            left = rebase_deadline(deadline, sender_now=metadata.scheduler_clock, now=0.0)
            producer.hold(req_id, left)

    def _start_read(self, reader: Reader, req_id: str, read: ReadRequest) -> None:
        if not read.awaited:
            self._give_back(reader, req_id, read)
            return
        if read.refused:
            self._refuse(req_id, FailureCause.BLOCKS, read.refused)
            self._give_back(reader, req_id, read)
            return
        try:
            reader.fetch(
                req_id,
                read.reference,
                read.local_block_ids,
                num_computed_blocks=read.num_computed_blocks,
                num_tokens=read.num_tokens,
            )
        except (KvNixlError, ValueError) as error:
            self._refuse(req_id, FailureCause.REFERENCE, str(error))

    def _refuse(self, req_id: str, cause: FailureCause, reason: str) -> None:
        self._refused.append(ReadOutcome(req_id, Stage.FAILED, cause=cause, reason=reason))

    def _give_back(self, reader: Reader, req_id: str, read: ReadRequest) -> None:
        """Tell the producer that its blocks are not needed."""
        try:
            reader.release(read.reference, req_id)
        except KvNixlError as error:
            self._warnings.warning(
                "release",
                "request %r will not be read, but its producer cannot be told and keeps its "
                "blocks until the lease ends: %s",
                req_id,
                error,
            )

    def _send_heartbeats(self, reader: Reader, heartbeats: Mapping[str, HeartbeatInfo]) -> None:
        assert self._heartbeats is not None
        report = self._heartbeats.send(heartbeats, reader.ranks_of, time.monotonic())
        failed = {engine_id for engine_id, _, _ in report.failed}
        for engine_id, info in heartbeats.items():
            if engine_id in report.to_connect:
                try:
                    reader.prepare(engine_id, info.host, info.port, tp_size=info.tp_size)
                except KvNixlError as error:
                    logger.debug("engine %r is not met ahead of time: %s", engine_id, error)
            elif engine_id not in failed and reader.ranks_of(engine_id):
                self._heard.add(engine_id)
        for engine_id, agent_name, reason in report.failed:
            logger.debug("no heartbeat to %s of engine %r: %s", agent_name, engine_id, reason)

    # --- what ended -----------------------------------------------------------------------------

    def finish_step(self) -> Any:
        """What ended since the last step, as vLLM's ``KVConnectorTransferResults``."""
        results = KVConnectorTransferResults()
        if self._producer is not None:
            for req_id, outcome in self._producer.step():
                if outcome is not LeaseOutcome.ABORTED:
                    results.finished_sending.add(req_id)
                logger.debug("request %r: its blocks are free: %s", req_id, outcome)
                if outcome is LeaseOutcome.EXPIRED:
                    self._warnings.warning(
                        "expired",
                        "the lease of request %r expired before it was read; its blocks are freed. "
                        "If its decode engine is alive but slow, raise kv_lease_duration",
                        req_id,
                    )
        if self._reader is not None:
            self._step_reader(self._reader)
        if self._received:
            results.finished_recving, self._received = self._received, set()
            results.failed_recving, self._failed = self._failed, set()
        return results

    def _step_reader(self, reader: Reader) -> None:
        refused, self._refused = self._refused, []
        for outcome in (*refused, *reader.step()):
            self._stats.record_outcome(
                outcome, num_descs_before=outcome.num_descs_before, transfers=outcome.transfers
            )
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s", describe(outcome))
            self._received.add(outcome.req_id)
            if not outcome.done:
                # vLLM ignores this for a request that it has given up itself.
                self._failed.add(outcome.req_id)
            if outcome.stage is Stage.FAILED:
                assert outcome.cause is not None
                self._warn(outcome.req_id, outcome.cause, outcome.reason)

    def _warn(self, req_id: str, cause: FailureCause, reason: str) -> None:
        what = (
            "KV blocks were read but are REJECTED"
            if cause is FailureCause.LEASE_ENDED
            else "KV blocks could not be read"
        )
        then = "it is recomputed here" if self._facts.recomputes else "it fails"
        self._warnings.warning(
            cause, "request %r: its %s: %s; %s. %s", req_id, what, reason, then, _hint(cause)
        )

    def take_stats(self) -> KvNixlStats | None:
        """What was counted since the last call; ``None`` if nothing was."""
        stats = self._stats
        if self._producer is not None:
            stats.update_producer(self._producer.counters, len(self._producer))
        cells = 0
        reader = self._reader
        if reader is not None:
            cells = reader.quarantined_cells
            stats.update_reader(
                reader.counters, in_progress=reader.num_requests, overdue=reader.num_overdue
            )
        if self._handshakes is not None:
            stats.update_handshakes(self._handshakes.outcomes)
        if self._agent is not None:
            stats.update_quarantine(cells, self._agent.quarantined)
        return stats.take()

    def worker_metadata(self) -> KvNixlWorkerMetadata | None:
        """What the scheduler should know; ``None`` if there is nothing."""
        busy = self._reader is not None and self._reader.busy
        # The end of being busy has to be said, or the engine would go on stepping for ever.
        if not busy and not self._was_busy and not self._heard:
            return None
        self._was_busy = busy
        heard, self._heard = self._heard, set()
        return KvNixlWorkerMetadata(heard, busy)


def describe(outcome: ReadOutcome) -> str:
    """One line about a request, with its times by stage."""
    if outcome.done:
        what = "read and verified" if outcome.verified else "read, not verified"
    elif outcome.stage is Stage.ABORTED:
        what = "aborted"
    else:
        what = f"failed ({outcome.cause}: {outcome.reason})"
    times = ", ".join(f"{stage} {spent * 1e3:.2f} ms" for stage, spent in outcome.seconds.items())
    return (
        f"request {outcome.req_id!r}: {what}; {outcome.num_bytes} bytes in {outcome.num_descs} "
        f"descriptors; {times}"
    )


def _hint(cause: FailureCause) -> str:
    remedy = _REMEDIES.get(cause, "")
    return remedy[:1].upper() + remedy[1:]
