"""The whole pull path: a producer's offer, the reference, a reader's fetch, the verified outcome.

The two ends run in the benchmark's two processes. References go from one to the other through a
pipe, as JSON text. A server has its own way for that, so it is in no figure.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from kvnixl.agent import Agent
from kvnixl.bench.cache import Cache
from kvnixl.bench.paths import TRANSFER_TIMEOUT_S, Sample
from kvnixl.compat import CompatibilityCheck
from kvnixl.errors import TransferError
from kvnixl.handshake import HandshakeClient, HandshakeServer
from kvnixl.outcomes import ReadOutcome
from kvnixl.producer import EmbeddedProducer, LeaseOutcome
from kvnixl.reader import Reader

# How often the producer steps while requests are under a lease, and looks whether it has to stop.
_STEP_INTERVAL_S = 0.001
_STOP_INTERVAL_S = 0.1


class Offer(NamedTuple):
    """An offered request.

    Attributes:
        seconds: what offering it took.
        reference: what the reader is told of it, JSON.
    """

    seconds: float
    reference: str


class Request(NamedTuple):
    """The producer's blocks of a request that is to be offered."""

    req_id: str
    blocks: list[int]


class OfferService:
    """The producing end. Steps in a thread of its own and offers what it is asked to.

    Args:
        agent: an agent of its own: another one may have the same memory registered.
        requests: gets lists of `Request`; answers with a list of `Offer`, or with what failed.
    """

    def __init__(
        self, agent: Agent, cache: Cache, compat: CompatibilityCheck, requests: Connection
    ) -> None:
        self._tokens = cache.shape.block_size
        self._requests = requests
        self._stopping = threading.Event()
        self._failed = ""
        self._producer = EmbeddedProducer(
            agent, cache.layout, compat=compat, server=HandshakeServer("127.0.0.1", 0)
        )
        self._thread = threading.Thread(target=self._serve, name="offers", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                held = len(self._producer)
                if self._requests.poll(_STEP_INTERVAL_S if held else _STOP_INTERVAL_S):
                    self._answer(self._requests.recv())
                elif held:
                    self._step()
        except (EOFError, OSError):
            pass  # the reader is gone, and with it everybody who could ask

    def _answer(self, requests: list[Request]) -> None:
        """Offers, or what failed so far: that ends the run over there."""
        self._step()
        offers: list[Offer] = []
        if not self._failed:
            try:
                offers = [self._offer(*request) for request in requests]
            except Exception as exc:
                self._failed = f"{type(exc).__name__}: {exc}"
        self._requests.send(self._failed or offers)

    def _offer(self, req_id: str, blocks: list[int]) -> Offer:
        start = time.perf_counter()
        reference = self._producer.offer(req_id, [blocks], len(blocks) * self._tokens)
        seconds = time.perf_counter() - start
        return Offer(seconds, json.dumps(reference))

    def _step(self) -> None:
        for req_id, outcome in self._producer.step():
            if outcome is not LeaseOutcome.READ:
                self._failed = f"the lease of {req_id} ended as {outcome.value!r}"

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._producer.close()


class PullPath:
    """The reading end. Every request has to end as verified.

    Args:
        agent: has the cache registered.
        offers: leads to an `OfferService`.
    """

    def __init__(
        self, agent: Agent, cache: Cache, compat: CompatibilityCheck, offers: Connection
    ) -> None:
        self._offers = offers
        self._fetched = 0
        self._handshakes = HandshakeClient(compat)
        self._reader = Reader(
            agent,
            cache.layout,
            engine_id="reader",
            handshakes=self._handshakes,
            register=False,
            lease_verification="require",
        )

    def fetch(self, local: Sequence[int], remote: Sequence[int]) -> Sample:
        """The time of the offer, and of the way from the reference to the verified outcome."""
        offers = self._offer([remote])
        sample = self._read(offers, [local])
        return Sample(offers[0].seconds + sample.seconds, sample.descs)

    def fetch_together(
        self, local: Sequence[Sequence[int]], remote: Sequence[Sequence[int]]
    ) -> Sample:
        """Requests at once: the time from the first fetch to the last outcome, without the offers,
        which a server makes one by one."""
        return self._read(self._offer(remote), local)

    def _offer(self, block_lists: Sequence[Sequence[int]]) -> list[Offer]:
        requests = []
        for blocks in block_lists:
            requests.append(Request(f"request-{self._fetched}", list(blocks)))
            self._fetched += 1
        try:
            self._offers.send(requests)
            if not self._offers.poll(TRANSFER_TIMEOUT_S):
                raise TransferError("offer", f"no answer after {TRANSFER_TIMEOUT_S:g} s")
            answer: list[Offer] | str = self._offers.recv()
        except (EOFError, OSError):
            raise TransferError("offer", "the producer is gone") from None
        if isinstance(answer, str):
            raise TransferError("offer", answer)
        return answer

    def _read(self, offers: Sequence[Offer], local: Sequence[Sequence[int]]) -> Sample:
        references = [json.loads(offer.reference) for offer in offers]
        reader = self._reader
        outcomes: list[ReadOutcome] = []
        start = time.perf_counter()
        for reference, blocks in zip(references, local, strict=True):
            reader.fetch(reference["remote_request_id"], reference, [blocks])
        while len(outcomes) < len(references):  # ends: the reader has timeouts for everything
            outcomes += reader.step()
        seconds = time.perf_counter() - start
        for outcome in outcomes:
            if not outcome.verified:
                raise TransferError(f"fetch of {outcome.req_id}", outcome.reason)
        return Sample(seconds, sum(outcome.num_descs for outcome in outcomes))

    def close(self) -> None:
        self._reader.close()
        self._handshakes.close()


class BurstPath:
    """The blocks in requests of so many blocks each, all fetched at once."""

    def __init__(self, path: PullPath, request_blocks: int) -> None:
        self._path = path
        self._request_blocks = request_blocks

    def fetch(self, local: Sequence[int], remote: Sequence[int]) -> Sample:
        return self._path.fetch_together(self._cut(local), self._cut(remote))

    def _cut(self, blocks: Sequence[int]) -> list[Sequence[int]]:
        length = self._request_blocks
        return [blocks[start : start + length] for start in range(0, len(blocks), length)]

    def close(self) -> None:
        pass
