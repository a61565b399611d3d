"""Engines without a model, for child processes: they hand out, read and check labelled KV blocks.

Each engine steps in a thread of its own, as servers do, so that a peer can be stopped or killed in
the middle of anything. Blocks are handed out in random order, and written over as soon as they are
free.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvnixl.agent import Agent, wait_until
from kvnixl.compat import CompatibilityCheck
from kvnixl.handshake import HandshakeClient, HandshakeServer
from kvnixl.layout import layout_from_tensors
from kvnixl.metadata import NixlHandshakePayload
from kvnixl.outcomes import FailureCause, ReadOutcome, Stage
from kvnixl.producer import EmbeddedProducer, EndedLease, Producer
from kvnixl.reader import Reader
from kvnixl.topology import heads_of_rank
from kvnixl.wire import encode_agent_metadata, encode_handshake_payload

HOST = "127.0.0.1"
WAIT_S = 40.0
LEASE_S = 100.0  # of leases that are not meant to expire
STEP_INTERVAL_S = 0.0005
MAX_POSITIONS = 1 << 16

# No content has these words.
FREED = np.uint64(2**64 - 1)  # in the producer's free blocks
UNUSED = np.uint64(2**64 - 2)  # in the reader's

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Model:
    """What the caches of an engine hold, over all its ranks."""

    layers: int = 2
    kv_heads: int = 4
    block_size: int = 4
    head_words: int = 4  # uint64 per head of a token

    @property
    def compat(self) -> CompatibilityCheck:
        return CompatibilityCheck(asdict(self))


class Cache:
    """The paged KV cache of one rank. Every word that is written has its own value."""

    def __init__(
        self, model: Model, num_blocks: int, fill: np.uint64, tp_rank: int = 0, tp_size: int = 1
    ) -> None:
        self.model = model
        self.fill = fill
        self._heads = np.array(heads_of_rank(model.kv_heads, tp_rank, tp_size), np.uint64)
        shape = (model.layers, num_blocks, len(self._heads), model.block_size, model.head_words)
        self.words: Words = np.full(shape, fill, np.uint64)
        self.layout = layout_from_tensors(
            {f"layers.{i}": layer for i, layer in enumerate(self.words)},
            num_kv_heads=model.kv_heads,
            tp_size=tp_size,
        )

    def content(self, number: int, positions: Iterable[int]) -> Words:
        """What the blocks of request ``number`` at these positions of its sequence hold."""
        model = self.model
        blocks = np.array(list(positions), np.uint64) + np.uint64(number * MAX_POSITIONS)
        layers = np.arange(model.layers, dtype=np.uint64)[:, None, None]
        rows = blocks[:, None] * np.uint64(model.layers) + layers
        rows = rows * np.uint64(model.kv_heads) + self._heads
        inner = np.arange(model.block_size * model.head_words, dtype=np.uint64)
        words: Words = rows[..., None] * np.uint64(inner.size) + inner
        return words.reshape(*words.shape[:3], model.block_size, model.head_words)

    def write(self, block_ids: Sequence[int], number: int) -> None:
        self.words[:, list(block_ids)] = self.content(number, range(len(block_ids)))

    def holds(self, block_ids: Sequence[int], number: int, first: int) -> bool:
        """Whether the blocks hold the request's content from position ``first`` on."""
        expected = self.content(number, range(first, first + len(block_ids)))
        return bool(np.array_equal(self.words[:, list(block_ids)], expected))

    def clear(self, block_ids: Sequence[int]) -> None:
        self.words[:, list(block_ids)] = self.fill

    def foreign_words(self, block_ids: Sequence[int]) -> int:
        """Words of free blocks that somebody has written."""
        return int(np.count_nonzero(self.words[:, list(block_ids)] != self.fill))


class FreeBlocks:
    """Hands out blocks in random order."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.ids = list(range(num_blocks))
        self._random = random.Random(seed)

    def take(self, count: int) -> list[int]:
        self._random.shuffle(self.ids)
        taken, self.ids = self.ids[:count], self.ids[count:]
        return taken


class Leftovers(NamedTuple):
    """What an engine has open or in use."""

    handles: dict[str, int]
    quarantined: int
    requests: int
    files: int
    threads: int


class Engine:
    """A thread that steps, and methods that a parent calls meanwhile."""

    def __init__(self, name: str, step: Callable[[], None]) -> None:
        self.agent = Agent.open(name)
        self.changed = threading.Condition()
        self._error: BaseException | None = None
        self._step = step
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            with self.changed:
                try:
                    self._step()
                except BaseException as error:
                    self._error = error
                    self._stopping = True
                self.changed.notify_all()
            time.sleep(STEP_INTERVAL_S)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Let the engine step until the condition holds; the caller has ``changed``."""
        self.changed.wait_for(lambda: self._error is not None or condition(), WAIT_S)
        if self._error is not None:
            raise RuntimeError("a step raised") from self._error
        if not condition():
            raise TimeoutError(f"not in {WAIT_S} s: {what}")

    def stop(self) -> None:
        self._stopping = True
        self._thread.join(WAIT_S)
        if self._error is not None:
            raise RuntimeError("a step raised") from self._error

    def leftovers(self, requests: int) -> Leftovers:
        return Leftovers(
            self.agent.live,
            self.agent.quarantined,
            requests,
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
        )


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- producers ------------------------------------------------------------------------------------


class Prefill:
    """A whole producing engine of one rank."""

    def __init__(
        self, engine_id: str, port: int, model: Model, num_blocks: int, seed: int = 0
    ) -> None:
        self.engine = Engine(f"{engine_id}-{os.getpid()}", self._step)
        self.cache = Cache(model, num_blocks, FREED)
        self.num_blocks = num_blocks
        self.free = FreeBlocks(num_blocks, seed)
        self.blocks: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.server = HandshakeServer(HOST, port)
        self.producer = EmbeddedProducer(
            self.engine.agent,
            self.cache.layout,
            compat=model.compat,
            server=self.server,
            engine_id=engine_id,
            num_lease_slots=256,
        )
        self.engine.start()

    def _step(self) -> None:
        for req_id, outcome in self.producer.step():
            block_ids = self.blocks.pop(req_id)
            self.cache.clear(block_ids)
            self.free.ids += block_ids
            self.ended[req_id] = outcome.value

    def port(self) -> int:
        return self.server.port

    def offer(
        self, lengths: dict[int, int], lease_duration: float, consumers: int = 1
    ) -> dict[int, dict[str, Any]]:
        """Compute and offer requests, by number; as many blocks each. Their references."""
        references = {}
        with self.engine.changed:
            for number, length in lengths.items():

                def enough(length: int = length) -> bool:
                    return len(self.free.ids) >= length

                self.engine.wait(enough, f"{length} free blocks of {self.num_blocks}")
                block_ids = self.free.take(length)
                self.cache.write(block_ids, number)
                req_id = str(number)
                self.blocks[req_id] = block_ids
                references[number] = self.producer.offer(
                    req_id,
                    [block_ids],
                    num_tokens=length * self.cache.model.block_size,
                    consumers=consumers,
                    lease_duration=lease_duration,
                )
        return references

    def wait_ended(self, numbers: Sequence[int]) -> dict[int, str]:
        """How these requests ended; those blocks are written over."""
        with self.engine.changed:
            self.engine.wait(
                lambda: all(str(number) in self.ended for number in numbers), "the leases' ends"
            )
            return {number: self.ended[str(number)] for number in numbers}

    def wait_idle(self) -> dict[str, int]:
        """The producer's counters once no block is in use."""
        with self.engine.changed:
            self.engine.wait(lambda: len(self.free.ids) == self.num_blocks, "all blocks free")
            assert sorted(self.free.ids) == list(range(self.num_blocks))
            assert len(self.producer) == 0
            return self.producer.counters.as_dict()

    def leftovers(self) -> Leftovers:
        return self.engine.leftovers(len(self.producer))

    def resident_bytes(self) -> int:
        return resident_bytes()

    def close(self) -> None:
        self.engine.stop()
        self.producer.close()
        assert self.engine.agent.close() == 0


class PrefillRank:
    """One rank of a producing engine; the scheduler is the test."""

    def __init__(
        self,
        engine_id: str,
        incarnation: int,
        model: Model,
        num_blocks: int,
        tp_rank: int,
        tp_size: int,
    ) -> None:
        self.engine = Engine(f"{engine_id}-{tp_rank}-{os.getpid()}", self._step)
        self.cache = Cache(model, num_blocks, FREED, tp_rank, tp_size)
        self.blocks: dict[str, list[int]] = {}
        self.ended: list[EndedLease] = []
        self.server: HandshakeServer | None = None
        self.producer = Producer(
            self.engine.agent,
            self.cache.layout,
            engine_id=engine_id,
            num_lease_slots=64,
            factors=model.compat.factors_text,
            incarnation=incarnation,
        )
        self.engine.start()

    def _step(self) -> None:
        for ended in self.producer.step():
            self.cache.clear(self.blocks.pop(ended.req_id))
            self.ended.append(ended)

    def payload(self) -> bytes:
        metadata = encode_agent_metadata(self.producer.metadata())
        payload = NixlHandshakePayload(self.cache.model.compat.hash, metadata)
        return encode_handshake_payload(payload)

    def serve(self, payloads: list[bytes]) -> tuple[str, int]:
        """Answer handshakes for all ranks; where."""
        self.server = HandshakeServer(HOST, 0)
        self.server.start({(0, rank): payload for rank, payload in enumerate(payloads)})
        return self.server.address

    def update(self, clears: Collection[str], arms: dict[str, tuple[int, int]]) -> None:
        with self.engine.changed:
            self.producer.update(clears, arms)

    def hold(self, requests: dict[int, list[int]], consumers: int) -> None:
        """The block ids of requests, by number."""
        with self.engine.changed:
            for number, block_ids in requests.items():
                self.cache.write(block_ids, number)
                self.blocks[str(number)] = block_ids
                self.producer.hold(str(number), LEASE_S, consumers)

    def take_ended(self, count: int) -> dict[int, str]:
        with self.engine.changed:
            self.engine.wait(lambda: len(self.ended) >= count, f"{count} ended leases")
            ended = {int(req_id): outcome.value for req_id, outcome in self.ended}
            assert len(ended) == len(self.ended)
            self.ended.clear()
            return ended

    def counters(self) -> dict[str, int]:
        return self.producer.counters.as_dict()

    def close(self) -> None:
        self.engine.stop()
        if self.server is not None:
            self.server.close()
        self.producer.close()
        assert self.engine.agent.close() == 0


# --- readers --------------------------------------------------------------------------------------


class Job(NamedTuple):
    """A request to read, of which the reader's prefix cache holds the first blocks."""

    number: int
    reference: dict[str, Any]
    computed: int = 0


class Result(NamedTuple):
    """What came of a request. ``right``: done, verified, and every byte is as it was written."""

    number: int
    done: bool
    right: bool
    cause: FailureCause | None = None
    reason: str = ""
    ended_in: Stage = Stage.DONE


class Decode:
    """A reading engine, or one rank of it."""

    def __init__(
        self,
        engine_id: str,
        model: Model,
        num_blocks: int,
        seed: int = 0,
        timeout: float = 20.0,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        self.engine = Engine(f"{engine_id}-{tp_rank}-{os.getpid()}", self._step)
        self.cache = Cache(model, num_blocks, UNUSED, tp_rank, tp_size)
        self.num_blocks = num_blocks
        self.free = FreeBlocks(num_blocks, seed)
        self.blocks: dict[str, tuple[Job, list[int]]] = {}
        self.results: list[Result] = []
        self.handshakes = HandshakeClient(model.compat, timeout=2.0)
        self.reader = Reader(
            self.engine.agent,
            self.cache.layout,
            engine_id=engine_id,
            handshakes=self.handshakes,
            tp_rank=tp_rank,
            tp_size=tp_size,
            lease_verification="require",
            request_timeout=timeout,
            backoff=(0.02, 0.2),
        )
        self.engine.start()

    def _step(self) -> None:
        for outcome in self.reader.step():
            self._take(outcome)

    def _take(self, outcome: ReadOutcome) -> None:
        (number, _, computed), block_ids = self.blocks.pop(outcome.req_id)
        done = outcome.done and outcome.verified
        right = done and self.cache.holds(block_ids, number, computed)
        self.results.append(
            Result(number, done, right, outcome.cause, outcome.reason, outcome.ended_in)
        )
        # Whatever arrives from here on is found in `foreign_words`.
        self.cache.clear(block_ids)
        self.free.ids += block_ids

    def fetch(self, jobs: list[Job], stop: bool = False, timeout: float | None = None) -> None:
        """Begin to read; or stop this process before it can begin."""
        with self.engine.changed:
            for job in jobs:
                length = len(job.reference["remote_block_ids"][0]) - job.computed
                block_ids = self.free.take(length)
                assert len(block_ids) == length, "not enough blocks"
                req_id = str(job.number)
                self.blocks[req_id] = (job, block_ids)
                self.reader.fetch(
                    req_id,
                    job.reference,
                    [block_ids],
                    num_computed_blocks=[job.computed],
                    timeout=timeout,
                )
            if stop:
                os.kill(os.getpid(), signal.SIGSTOP)

    def take_results(self, count: int) -> list[Result]:
        """That many results."""
        with self.engine.changed:
            self.engine.wait(lambda: len(self.results) >= count, f"{count} results")
            results, self.results = self.results, []
            return results

    def wait_stage(self, number: int, stage: Stage) -> bool:
        """Whether the request was seen in a stage, or else has ended before."""
        req_id = str(number)
        with self.engine.changed:
            self.engine.wait(
                lambda: self.reader.stage(req_id) is stage or req_id not in self.blocks,
                f"request {number} {stage.value}",
            )
            return self.reader.stage(req_id) is stage

    def wait_overdue(self, number: int) -> str:
        """Why the request will fail once its transfers are over."""
        with self.engine.changed:
            self.engine.wait(lambda: str(number) in self.reader.overdue(), "an overdue request")
            return self.reader.overdue()[str(number)]

    def foreign_words(self) -> int:
        """Words that were written to blocks that are not in use."""
        with self.engine.changed:
            return self.cache.foreign_words(self.free.ids)

    def leftovers(self) -> Leftovers:
        """Once no request is under way and nothing in quarantine."""
        with self.engine.changed:
            self.engine.wait(
                lambda: not self.blocks and not self.engine.agent.retry_releases(), "the end"
            )
            assert sorted(self.free.ids) == list(range(self.num_blocks))
            assert self.reader.bytes_in_flight == 0
            return self.engine.leftovers(self.reader.num_requests)

    def resident_bytes(self) -> int:
        return resident_bytes()

    def close(self) -> None:
        self.engine.stop()
        assert wait_until(lambda: self.reader.close() == 0, WAIT_S)
        assert self.cache.foreign_words(self.free.ids) == 0
        self.handshakes.close()
        live = self.engine.agent.live
        assert not any(live.values()), live
        assert self.engine.agent.close() == 0
