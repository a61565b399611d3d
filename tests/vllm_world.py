"""Engines without a model: vLLM's own scheduler and kvnixl's connector over the fake network.

`Engine` is one engine: vLLM's real ``Scheduler`` (or ``AsyncScheduler``), the connector in both
roles, and a forward pass that only writes KV. `Net` is what joins engines: a clock, the fake NIXL
and side channels in process. No thread, no socket, no model, no real time.

The KV of a token is a number that depends on all tokens before it, so that every forward pass can
check that whatever it reads is right, wherever it came from.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvnixl.agent import Agent
from kvnixl.errors import HandshakeError, HandshakeTimeoutError
from kvnixl.fake import FakeFabric
from kvnixl.handshake import HandshakeDone, HandshakeFailed, HandshakeOutcome, PeerAddress, Rank
from kvnixl.layout import CacheLayout, layout_from_tensors
from kvnixl.producer import Producer
from kvnixl.reader import Reader
from kvnixl.wire import open_handshake

vllm = pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter")

import torch  # noqa: E402
from vllm.config import (  # noqa: E402
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

from kvnixl.vllm import connector as connector_module  # noqa: E402
from kvnixl.vllm import scheduler as scheduler_module  # noqa: E402
from kvnixl.vllm import worker as worker_module  # noqa: E402
from kvnixl.vllm.adapter import KVConnectorRole  # noqa: E402
from kvnixl.vllm.connector import KvNixlConnector  # noqa: E402

BLOCK_SIZE = 4
KV_HEADS = 2
LAYERS = ("layers.0", "layers.1")
HOST = "127.0.0.1"

_MASK = 2**64 - 1
_hash_fn = get_hash_fn_by_name("sha256")
init_none_hash(_hash_fn)
_hasher = get_request_block_hasher(BLOCK_SIZE, _hash_fn)


def kv_of(tokens: Iterable[int]) -> list[int]:
    """What the cache holds for each of the tokens."""
    value, values = 1, []
    for token in tokens:
        value = (value * 6364136223846793005 + token + 1442695040888963407) & _MASK
        values.append(value & ~0xFF)
    return values


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class SideChannel:
    """As much of `HandshakeServer` as the scheduler uses."""

    def __init__(self, *, host: str, port: int, **_: Any) -> None:
        self._net = Net.current
        self.address = (host, port)
        self.payloads: dict[Rank, bytes] = {}

    def start(self, payloads: Mapping[Rank, bytes]) -> None:
        assert self.address not in self._net.servers, "the port is taken"
        self._net.servers[self.address] = self
        self.publish(payloads)

    def publish(self, payloads: Mapping[Rank, bytes]) -> None:
        self.payloads = dict(payloads)

    def close(self) -> None:
        if self._net.servers.get(self.address) is self:
            del self._net.servers[self.address]


class Handshakes:
    """As much of `HandshakeClient` as the worker uses; answers after a few polls."""

    def __init__(self, compat: Any, *, timeout: float, allowed: Any = None, **_: Any) -> None:
        self._net = Net.current
        self._compat = compat
        self._timeout = timeout
        self.allowed = allowed
        self.outcomes: Counter[str] = Counter()
        self.pending: dict[PeerAddress, tuple[list[Rank], int, float]] = {}
        self.closed = False

    def start(
        self,
        engine_id: str,
        host: str,
        port: int,
        ranks: Iterable[Rank] = ((0, 0),),
        *,
        timeout: float | None = None,
    ) -> bool:
        peer = PeerAddress(engine_id, host, port)
        if peer in self.pending:
            return False
        polls = self._net.choose("handshake polls", 4)
        until = self._net.clock.now + (self._timeout if timeout is None else timeout)
        self.pending[peer] = (list(ranks), polls, until)
        return True

    def cancel(self, peer: PeerAddress) -> bool:
        return self.pending.pop(peer, None) is not None

    def poll(self, timeout: float = 0.0) -> list[HandshakeOutcome]:
        outcomes: list[HandshakeOutcome] = []
        for peer, (ranks, polls, until) in list(self.pending.items()):
            server = self._net.servers.get((peer.host, peer.port))
            late = self._net.clock.now >= until
            if not late and (polls or server is None):
                self.pending[peer] = (ranks, max(polls - 1, 0), until)
                continue
            del self.pending[peer]
            try:
                if late or server is None:
                    raise HandshakeTimeoutError(
                        peer.host, peer.port, self._timeout, connected=False
                    )
                clock = msgspec.msgpack.encode(self._net.clock.now)
                opened = {
                    rank: open_handshake(
                        [server.payloads[rank], clock],
                        self._compat,
                        expected_engine_id=peer.engine_id,
                    )
                    for rank in ranks
                    if rank in server.payloads
                }
                if len(opened) < len(ranks):
                    raise HandshakeError("it does not have these ranks")
            except HandshakeError as error:
                self.outcomes[type(error).__name__] += 1
                outcomes.append(HandshakeFailed(peer, error, 0.0))
            else:
                self.outcomes["done"] += 1
                outcomes.append(HandshakeDone(peer, opened, None, 0.0))
        return outcomes

    def close(self) -> None:
        self.closed = True
        self.pending.clear()


class Net:
    """What engines share. The one that was made last is `Net.current`."""

    current: Net

    def __init__(self, choose: Callable[[str, int], int] | None = None) -> None:
        Net.current = self
        self.choose = choose or (lambda _label, _n: 0)
        self.clock = Clock()
        self.fabric = FakeFabric(chooser=self.choose)
        self.servers: dict[tuple[str, int], SideChannel] = {}
        self.agents: list[str] = []
        self.starting: tuple[str, int] = ("", 0)  # engine and rank whose agent opens next
        self.graveyard: list[object] = []  # memory that transfers of the dead may name


# Clocks of two processes begin anywhere.
SCHEDULER_AHEAD_S = 1e6


@contextmanager
def joined() -> Iterator[None]:
    """Engines that are made meanwhile use `Net.current` instead of NIXL, ZeroMQ and the time."""

    def make(kind: Callable[..., Any], **more: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: kind(*args, **kwargs, **{"clock": clock, **more})

    def clock() -> float:
        return Net.current.clock()

    def schedulers_clock() -> float:
        return clock() + SCHEDULER_AHEAD_S

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            connector_module,
            "KvNixlScheduler",
            make(scheduler_module.KvNixlScheduler, clock=schedulers_clock),
        )
        patch.setattr(connector_module, "worker_rank", lambda: Net.current.starting[1])
        patch.setattr(connector_module, "adopt_vllm_logging", lambda: None)
        patch.setattr(scheduler_module, "HandshakeServer", SideChannel)
        patch.setattr(worker_module, "Agent", SimpleNamespace(open=lambda **_: open_agent()))
        patch.setattr(worker_module, "HandshakeClient", Handshakes)
        patch.setattr(worker_module, "Producer", make(Producer))
        patch.setattr(
            worker_module, "Reader", make(Reader, wait=lambda _: Net.current.fabric.progress(1))
        )
        patch.setattr(worker_module, "cache_layout", _layout)
        patch.setattr(worker_module, "attn_backend_name", lambda _config: "FAKE")
        patch.setattr(worker_module, "compatibility_factors", lambda _c, _b: {"model": "m"})
        patch.setattr(worker_module, "time", SimpleNamespace(monotonic=clock))
        patch.setattr(logging.getLogger("vllm"), "level", logging.ERROR)
        yield


def open_agent() -> Agent:
    """The fake NIXL agent of the rank that starts."""
    net = Net.current
    engine, rank = net.starting
    name = f"{engine}-{rank}-{len(net.agents)}"
    net.agents.append(name)
    return Agent(net.fabric.agent(name))


def _layout(config: Any, groups: Any, caches: Mapping[str, npt.NDArray[np.uint64]]) -> CacheLayout:
    return layout_from_tensors(
        caches,
        num_kv_heads=KV_HEADS,
        tp_size=config.parallel_config.tensor_parallel_size,
        groups={layer: n for n, group in enumerate(groups) for layer in group.layers},
        sliding_windows=[group.sliding_window for group in groups],
        attn_backend="FAKE",
    )


def make_config(
    *,
    engine_id: str = "engine",
    role: str = "kv_both",
    asynchronous: bool = False,
    policy: str = "recompute",
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    num_blocks: int = 16,
    prefix_caching: bool = True,
    tp_size: int = 1,
    **extra_config: Any,
) -> VllmConfig:
    """A configuration of real vLLM, except for the model, which is a stand-in."""
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=256,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            scheduler_reserve_full_isl=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=prefix_caching),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvNixlConnector",
            kv_connector_module_path="kvnixl.vllm",
            kv_role=role,
            engine_id=engine_id,
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra_config,
        ),
        device_config=DeviceConfig(device="cpu"),
    )
    # The CPU platform switches it off.
    config.scheduler_config.async_scheduling = asynchronous
    config.parallel_config.tensor_parallel_size = tp_size
    config.cache_config.num_gpu_blocks = num_blocks
    config.model_config = SimpleNamespace(
        max_model_len=256,
        runner_type="generate",
        multimodal_config=None,
        **dict.fromkeys(
            (
                "enable_return_routed_experts",
                "enable_sleep_mode",
                "is_diffusion",
                "is_encoder_decoder",
                "is_hybrid",
                "is_mm_prefix_lm",
                "is_multimodal_model",
                "return_sampling_mask",
                "supports_multimodal_inputs",
                "use_mla",
                "uses_mrope",
            ),
            False,
        ),
    )
    return config


def full_attention(block_size: int = BLOCK_SIZE, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{"num_kv_heads": KV_HEADS, "head_size": 8, "dtype": torch.float32, **more},
        block_size=block_size,
    )


def make_cache_config(num_blocks: int = 16) -> KVCacheConfig:
    group = KVCacheGroupSpec(list(LAYERS), full_attention())
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group])


def make_request(
    req_id: str, tokens: list[int], params: Any = None, max_tokens: int = 1, **more: Any
) -> Request:
    """A real request of vLLM."""
    extra = None if params is None else {"kv_transfer_params": params}
    return Request(
        request_id=req_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens, extra_args=extra, **more),
        pooling_params=None,
        block_hasher=_hasher,
    )


@dataclass
class Row:
    """A request in the model runner."""

    tokens: list[int]
    blocks: list[int]
    num_computed: int


@dataclass(eq=False)
class WorkerRank:
    """One worker."""

    connector: KvNixlConnector
    caches: dict[str, npt.NDArray[np.uint64]]

    @property
    def slot_words(self) -> npt.NDArray[np.int64] | None:
        producer = self.connector._worker._producer
        return None if producer is None or producer._slots is None else producer._slots.words


@dataclass(eq=False)
class Engine:
    """One start of an engine.

    Attributes:
        answers: request id -> the ``kv_transfer_params`` of its answer.
        finished: request id -> how it ended.
        sent, received: how often vLLM was told so of each request.
        failed: requests whose reads failed.
        delayed: requests whose blocks vLLM was asked to keep.
        metadata: what the last step told the workers.
    """

    net: Net
    name: str
    port: int
    tp_size: int = 1
    asynchronous: bool = False
    num_blocks: int = 16
    policy: str = "recompute"
    options: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    alive: bool = True

    def __post_init__(self) -> None:
        net = self.net
        self.config = make_config(
            engine_id=self.name,
            asynchronous=self.asynchronous,
            policy=self.policy,
            num_blocks=self.num_blocks,
            tp_size=self.tp_size,
            **self.limits,
            **{"side_channel_host": HOST, "side_channel_port": self.port, **self.options},
        )
        cache_config = make_cache_config(self.num_blocks)
        self.ranks: list[WorkerRank] = []
        shape = (self.num_blocks, KV_HEADS // self.tp_size, BLOCK_SIZE, 1)
        for rank in range(self.tp_size):
            net.starting = (self.name, rank)
            worker = KvNixlConnector(self.config, KVConnectorRole.WORKER, cache_config)
            caches = {layer: np.zeros(shape, np.uint64) for layer in LAYERS}
            net.graveyard.append(caches)
            worker.register_kv_caches(caches)
            self.ranks.append(WorkerRank(worker, caches))
        self.agents = net.agents[-self.tp_size :]
        kind = AsyncScheduler if self.asynchronous else Scheduler
        self.scheduler = kind(
            self.config,
            cache_config,
            SimpleNamespace(accept_tokens=lambda *_: True, should_advance=lambda *_: False),
            block_size=BLOCK_SIZE,
            log_stats=False,
        )
        self.connector: KvNixlConnector = self.scheduler.connector
        exported = {
            (0, number): payload
            for number, rank in enumerate(self.ranks)
            if (payload := rank.connector.get_handshake_metadata()) is not None
        }
        self.connector.set_xfer_handshake_metadata_pp_aware(exported)
        self.aggregator = KVOutputAggregator.from_connector(self.connector, self.tp_size)
        self.queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.rows: dict[str, Row] = {}
        self.aborts: list[str] = []  # that arrive while a step runs
        self.promised: dict[int, tuple[str, set[int]]] = {}  # nonce -> whose, which blocks
        self.answers: dict[str, dict[str, Any]] = {}
        self.finished: dict[str, str] = {}
        self.tokens: dict[str, list[int]] = {}
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.failed: set[str] = set()
        self.awaited: set[str] = set()
        self.delayed: set[str] = set()
        self.metadata: Any = None
        self.num_preempted = 0
        self._watch()

    def _watch(self) -> None:
        """Note what the scheduler promises to vLLM."""
        connector = self.connector
        finish = connector.request_finished_all_groups

        def request_finished(request: Any, block_ids: Any) -> Any:
            delay, params = finish(request, block_ids)
            if delay:
                assert request.request_id not in self.delayed
                self.delayed.add(request.request_id)
            return delay, params

        connector.request_finished_all_groups = request_finished

    # --- what a user does -----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def abort(self, req_id: str, *, while_running: bool = False) -> None:
        if while_running:
            self.aborts.append(req_id)
        else:
            self._finish([req_id])

    def _finish(self, req_ids: list[str]) -> None:
        for request in self.scheduler.finish_requests(req_ids, RequestStatus.FINISHED_ABORTED):
            self.finished[request.request_id] = "abort"

    def run(self, steps: int = 100, until: Callable[[], bool] = lambda: False) -> None:
        """Step until the engine has nothing to do, or the condition holds."""
        for _ in range(steps):
            if until() or not self.busy:
                return
            self.step()
        assert until() or not self.busy, f"{self.name} goes on for more than {steps} steps"

    @property
    def busy(self) -> bool:
        return bool(self.queue) or self.scheduler.has_requests()

    # --- a step ---------------------------------------------------------------------------------

    def step(self) -> None:
        """As EngineCore does it, synchronously or with a queue of two batches."""
        scheduler = self.scheduler
        if scheduler.has_requests():
            output = scheduler.schedule()
            self._note_arms(output)
            self.num_preempted += len(output.preempted_req_ids)
            self.queue.append((output, self._execute(output)))
            more = output.total_num_scheduled_tokens or scheduler.has_requests()
            if self.asynchronous and len(self.queue) < 2 and more:
                return
        if not self.queue:
            return
        self._finish(self.aborts)
        self.aborts = []
        output, result = self.queue.popleft()
        self._note_results(result.kv_connector_output)
        for outputs in scheduler.update_from_output(output, result).values():
            for answer in outputs.outputs:
                self.tokens.setdefault(answer.request_id, []).extend(answer.new_token_ids)
                if answer.finish_reason is not None:
                    assert answer.request_id not in self.finished, "answered twice"
                    self.finished[answer.request_id] = str(answer.finish_reason)
                if answer.kv_transfer_params is not None:
                    self.answers[answer.request_id] = answer.kv_transfer_params

    def _note_arms(self, output: SchedulerOutput) -> None:
        self.metadata = output.kv_connector_metadata
        for req_id, (_, nonce) in self.metadata.lease_arms.items():
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(req_id)
            self.promised[nonce] = (req_id, set(blocks))
        self.awaited |= {r for r, read in self.metadata.reads.items() if read.awaited}

    def _note_results(self, output: KVConnectorOutput | None) -> None:
        if output is None:
            return
        self.sent.update(output.finished_sending or ())
        self.received.update(output.finished_recving or ())
        assert output.failed_recving <= set(output.finished_recving or ())
        self.failed |= output.failed_recving
        assert not output.invalid_block_ids
        assert set(output.finished_sending or ()) <= self.delayed
        assert set(output.finished_recving or ()) <= self.awaited
        for reported in (self.sent, self.received):
            assert max(reported.values(), default=0) <= 1, f"{self.name} reports twice: {reported}"

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._update_rows(output)
        results = []
        for rank in self.ranks:
            connector = rank.connector
            connector.handle_preemptions(output.kv_connector_metadata)
            connector.bind_connector_metadata(output.kv_connector_metadata)
            self._forward(rank, output)
            connector.start_load_kv(None)
            connector.wait_for_save()
            told = connector.get_transfer_results(output.finished_req_ids)
            result = KVConnectorOutput(
                finished_sending=told.finished_sending,
                finished_recving=told.finished_recving,
                failed_recving=told.failed_recving,
                invalid_block_ids=connector.get_block_ids_with_load_errors(),
                kv_connector_stats=connector.get_kv_connector_stats(),
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            )
            connector.clear_connector_metadata()
            idle = not output.total_num_scheduled_tokens and result.is_empty()
            results.append(self._sample(output, None if idle else result))
        answer = results[0]
        if self.tp_size > 1:
            answer = self.aggregator.aggregate(results)
        for req_id, sampled in zip(answer.req_ids, answer.sampled_token_ids, strict=True):
            self.rows[req_id].tokens += sampled
        for req_id, count in output.num_scheduled_tokens.items():
            self.rows[req_id].num_computed += count
        return answer

    def _update_rows(self, output: SchedulerOutput) -> None:
        for req_id in output.finished_req_ids:
            self.rows.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            (blocks,) = new.block_ids
            self.rows[new.req_id] = Row(
                list(new.prompt_token_ids or ()), list(blocks), new.num_computed_tokens
            )
        cached = output.scheduled_cached_reqs
        for number, req_id in enumerate(cached.req_ids):
            row = self.rows[req_id]
            row.num_computed = cached.num_computed_tokens[number]
            blocks = cached.new_block_ids[number]
            if req_id in cached.resumed_req_ids:
                assert blocks is not None
                row.blocks = list(blocks[0])
                row.tokens = list(cached.all_token_ids[req_id])
            elif blocks is not None:
                row.blocks += blocks[0]

    def _forward(self, rank: WorkerRank, output: SchedulerOutput) -> None:
        """Check what is read, and that what is written belongs to nobody else."""
        words = rank.slot_words
        stale = [] if words is None else [self._freed(int(nonce)) for nonce in words[words != 0]]
        first_head = self.ranks.index(rank) * (KV_HEADS // self.tp_size)
        for req_id, count in output.num_scheduled_tokens.items():
            row = self.rows[req_id]
            begin, end = row.num_computed, row.num_computed + count
            assert end <= len(row.tokens), f"{req_id}: {end} of {len(row.tokens)} tokens"
            values = np.array(kv_of(row.tokens[:end]), np.uint64)
            blocks = np.array(row.blocks)[np.arange(end) // BLOCK_SIZE]
            for owner, freed in stale:
                assert not freed & set(blocks[begin:].tolist()), (
                    f"{self.name}: {req_id} writes blocks of {owner}, whose lease is not cleared"
                )
            for number, layer in enumerate(LAYERS):
                cache = rank.caches[layer]
                for head in range(cache.shape[1]):
                    here = values + np.uint64(number * KV_HEADS + first_head + head)
                    places = (blocks, head, np.arange(end) % BLOCK_SIZE, 0)
                    assert np.array_equal(cache[places][:begin], here[:begin]), (
                        f"{self.name}: {req_id} computes on from wrong KV"
                    )
                    cache[places] = here
                for block in set(blocks[begin:].tolist()):
                    address, size = cache[block].ctypes.data, cache[block].nbytes
                    writers = self.net.fabric.writers(address, size)
                    assert not writers, f"{self.name}: {writers} write blocks of {req_id}"

    def _freed(self, nonce: int) -> tuple[str, set[int]]:
        """Whose lease it is, and which of the blocks that it promises vLLM has taken back."""
        owner, promised = self.promised[nonce]
        kept: list[int] = []
        if owner in self.scheduler.requests:
            (kept,) = self.scheduler.kv_cache_manager.get_block_ids(owner)
        return owner, promised - set(kept)

    def _sample(
        self, output: SchedulerOutput, connector_output: KVConnectorOutput | None
    ) -> ModelRunnerOutput:
        req_ids = list(output.num_scheduled_tokens)
        sampled = []
        for req_id in req_ids:
            row = self.rows[req_id]
            end = row.num_computed + output.num_scheduled_tokens[req_id]
            # A number that no prompt has, so that answers do not become hits of others' prompts.
            sampled.append([] if end < len(row.tokens) else [100 + kv_of(row.tokens)[-1] % 97])
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: number for number, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )

    # --- its end --------------------------------------------------------------------------------

    def kill(self, in_flight: str = "fail") -> None:
        """Its process dies."""
        self.alive = False
        for name in self.agents:
            self.net.fabric.kill(name, in_flight=in_flight)
        self.net.servers.pop((HOST, self.port), None)

    def check_empty(self) -> None:
        """Nothing is left of any request."""
        half = self.connector._scheduler
        assert not self.scheduler.requests
        for name, value in vars(half).items():
            if isinstance(value, dict | set | list) and name != "_said":
                assert not value, f"{name} still has {value}"
        assert not len(half._heartbeats)
        assert not half.has_pending_work()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.num_blocks - 1
        if half._leases is not None:
            assert half._leases.num_free == half._leases.num_slots
        for rank in self.ranks:
            worker = rank.connector._worker
            assert not worker._received
            assert not worker._failed
            assert not worker._refused
            if worker._producer is not None:
                assert not len(worker._producer)
                assert not worker._producer._armed
                assert not worker._producer._ended
            if rank.slot_words is not None:
                assert not rank.slot_words.any()
            if worker._reader is not None:
                assert not worker._reader.num_requests
        assert self.sent.keys() == self.delayed
        assert self.received.keys() == self.awaited

    def shutdown(self) -> None:
        self.alive = False
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()
