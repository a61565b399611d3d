"""Telling owners that their blocks are not needed any more.

A kvnixl peer gets a binary notification that names the lease, or the request id if there is none; a
stock peer gets vLLM's text. What rides on a READ is encoded here, the rest is sent alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvnixl.agent import Agent
from kvnixl.errors import AgentError, WireError
from kvnixl.metadata import Lease
from kvnixl.outcomes import ReaderCounters
from kvnixl.remotes import Incarnation
from kvnixl.wire import Outcome, encode_completion, encode_text_completion

__all__ = ["Completions"]

logger = logging.getLogger(__name__)


class Completions:
    """The completions of one sender.

    Args:
        agent: sends those that go alone.
        sender: tells them from those of other starts of this worker.
        counters: where they are counted.
    """

    def __init__(self, agent: Agent, sender: int, counters: ReaderCounters) -> None:
        self._agent = agent
        self._sender = sender
        self._counters = counters
        self._sequence = 0

    def next_sequence(self) -> int:
        """The number of the next notification."""
        self._sequence += 1
        return self._sequence

    def encode(
        self,
        incarnation: Incarnation,
        tp_rank: int,
        outcome: Outcome,
        lease: Lease | None,
        remote_request_id: str,
    ) -> bytes:
        """The message to one rank about one request; empty where it cannot be said."""
        consumers = incarnation.plan.consumers[tp_rank]
        if incarnation.ranks[tp_rank].binary:
            return encode_completion(
                outcome,
                consumers,
                sender=self._sender,
                sequence=self.next_sequence(),
                leases=() if lease is None else (lease,),
                request_ids=(remote_request_id,) if lease is None else (),
            )
        try:
            return encode_text_completion(remote_request_id, consumers)
        except WireError:
            self._counters.notifications_inexpressible += 1
            return b""

    def encode_leases(
        self, incarnation: Incarnation, tp_rank: int, leases: Sequence[Lease]
    ) -> bytes:
        """The message to one rank of a kvnixl peer that all these were read."""
        return encode_completion(
            Outcome.DONE,
            incarnation.plan.consumers[tp_rank],
            sender=self._sender,
            sequence=self.next_sequence(),
            leases=leases,
        )

    def send(self, incarnation: Incarnation, tp_rank: int, message: bytes) -> AgentError | None:
        """Send a message alone; the error if that failed. Nothing is sent to a dead peer."""
        if not message or incarnation.gone:
            return None
        try:
            self._agent.send_notif(incarnation.ranks[tp_rank].agent, message)
        except AgentError as error:
            self._counters.notifications_failed += 1
            logger.info("%s: %s", incarnation.remote.key, error)
            return error
        self._counters.notifications += 1
        return None
