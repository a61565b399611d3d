"""An inference server that embeds kvnixl: one process computes prompts, another one decodes.

``python examples/embed_server.py`` shows all of it: it starts both processes, sends prompts through
them, and compares every token with the same model in a single process.

The two roles can be run by hand. What ``/prefill`` answers is what ``/generate`` wants::

    python examples/embed_server.py --serve prefill --port 8100
    python examples/embed_server.py --serve decode --port 8200
    curl -d '{"prompt": "Once upon a time", "max_tokens": 24}' localhost:8100/prefill > kv.json
    curl -d @kv.json localhost:8200/generate

How one request goes: the prefill engine computes the prompt into blocks of its cache, *offers* the
blocks and answers with a reference to them, a few JSON values. The decode engine takes the
reference, allocates blocks of its own and *fetches*. Once the read is done and the lease was
verified, it decodes; after any failure it computes the prompt itself. The prefill engine frees its
blocks when the lease has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from tiny_llm import (
    VOCABULARY,
    BlockAllocator,
    ModelConfig,
    PagedCache,
    Transformer,
    blocks_for,
    generate,
)

from kvnixl.agent import Agent
from kvnixl.compat import CompatibilityCheck
from kvnixl.errors import KvNixlError
from kvnixl.handshake import HandshakeClient, HandshakeServer, RemoteAllowList
from kvnixl.layout import layout_from_tensors
from kvnixl.producer import EmbeddedProducer, EndedLease
from kvnixl.reader import Reader, ReadOutcome

Json = dict[str, Any]

CONFIG = ModelConfig()
NUM_BLOCKS = 128
HOST = "127.0.0.1"
MAX_BODY_BYTES = 1 << 20
CALL_TIMEOUT_S = 30.0
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
SETTLE_S = 5.0
DRAIN_S = 5.0  # for readers of what is still offered when the prefill engine stops
# How long an engine waits for the next call before it looks after its transfers and leases.
BUSY_WAIT_S = 0.001
IDLE_WAIT_S = 0.1


# --- moving KV: all that kvnixl is used for -------------------------------------------------------

# What two engines must have in common so that one can read the other's blocks.
COMPAT = CompatibilityCheck({"model": "tiny_llm", "dtype": "float32", **asdict(CONFIG)})


class PrefillKv:
    """Offers the blocks of computed prompts to readers."""

    def __init__(self, cache: PagedCache, host: str) -> None:
        layout = layout_from_tensors(cache.layers, num_kv_heads=CONFIG.num_kv_heads)
        server = HandshakeServer(host, 0, host_option="--host")
        self.agent = Agent.open()
        self.producer = EmbeddedProducer(self.agent, layout, compat=COMPAT, server=server)

    def offer(self, req_id: str, block_ids: list[int], prompt: list[int]) -> Json:
        """Promise that the blocks stay as they are; returns what a reader needs to know."""
        return self.producer.offer(req_id, [block_ids], len(prompt), prompt_token_ids=prompt)

    def cancel(self, req_id: str) -> bool:
        return self.producer.cancel(req_id)

    def step(self) -> list[EndedLease]:
        """Offers that are over; their blocks may be written again."""
        return self.producer.step()

    def close(self) -> None:
        self.producer.drain(DRAIN_S)
        self.producer.close()
        self.agent.close()


class DecodeKv:
    """Reads the blocks of offered prompts into this engine's cache.

    References come from clients, and only name a host in ``prefill_hosts``.
    """

    def __init__(self, cache: PagedCache, prefill_hosts: list[str]) -> None:
        layout = layout_from_tensors(cache.layers, num_kv_heads=CONFIG.num_kv_heads)
        self.agent = Agent.open()
        self.handshakes = HandshakeClient(COMPAT, allowed=RemoteAllowList(prefill_hosts))
        self.reader = Reader(
            self.agent,
            layout,
            engine_id=self.agent.name,
            handshakes=self.handshakes,
            lease_verification="require",
        )

    def fetch(self, req_id: str, reference: Json, block_ids: list[int], prompt: list[int]) -> None:
        self.reader.fetch(
            req_id, reference, [block_ids], num_tokens=len(prompt), prompt_token_ids=prompt
        )

    def release(self, reference: object) -> None:
        """Tell the engine that offers the blocks that they will not be read."""
        with contextlib.suppress(KvNixlError):  # it is no reference
            self.reader.release(reference)

    def step(self) -> list[ReadOutcome]:
        """Reads that are over, well or not; their blocks may be written again."""
        return self.reader.step()

    def close(self) -> None:
        self.reader.close(DRAIN_S)
        self.handshakes.close()
        self.agent.close()


# --- engines --------------------------------------------------------------------------------------


@dataclass
class Request:
    """One prompt on its way through an engine."""

    prompt: list[int]
    max_tokens: int
    reply: Future[Json]
    reference: Any = None
    tokens: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    kv: str = ""  # how the prompt's KV got here
    bytes_read: int = 0

    @classmethod
    def parse(cls, body: Json, reply: Future[Json]) -> Request:
        """A request from outside; ValueError says what is wrong with it."""
        prompt, max_tokens = body.get("prompt"), body.get("max_tokens", 16)
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("prompt must be a text that is not empty")
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(f"max_tokens must be a positive number, not {max_tokens!r}")
        request = cls(list(prompt.encode()), max_tokens, reply)
        if request.num_blocks > NUM_BLOCKS:
            raise ValueError(
                f"{len(request.prompt)} bytes and {max_tokens} tokens need {request.num_blocks} "
                f"blocks of {CONFIG.block_size} tokens, but the cache has {NUM_BLOCKS}"
            )
        return request

    @property
    def num_prompt_blocks(self) -> int:
        return blocks_for(len(self.prompt), CONFIG.block_size)

    @property
    def num_blocks(self) -> int:
        return blocks_for(len(self.prompt) + self.max_tokens, CONFIG.block_size)


class Engine:
    """A model, its paged cache, and the calls that HTTP threads submit.

    Only the thread in `run` touches the model, the cache and kvnixl.
    """

    def __init__(self, seed: int) -> None:
        self.model = Transformer(CONFIG)
        self.cache = PagedCache(CONFIG, NUM_BLOCKS)
        self.blocks = BlockAllocator(NUM_BLOCKS, seed)
        self.counts: Counter[str] = Counter()
        self.routes: dict[str, Callable[[Json, Future[Json]], None]] = {"/stats": self.on_stats}
        self._calls: queue.SimpleQueue[tuple[str, Json, Future[Json]] | None] = queue.SimpleQueue()

    def submit(self, path: str, body: Json) -> Future[Json]:
        """Have a route called by the engine's thread. For any thread."""
        reply: Future[Json] = Future()
        self._calls.put((path, body, reply))
        return reply

    def stop(self) -> None:
        """Make `run` return. For any thread, and for signal handlers."""
        self._calls.put(None)

    def run(self) -> None:
        """Answer calls until `stop`."""
        while True:
            try:
                call = self._calls.get(timeout=self.step())
            except queue.Empty:
                continue
            if call is None:
                return
            path, body, reply = call
            try:
                self.routes[path](body, reply)
            except (ValueError, KvNixlError) as error:
                reply.set_exception(error)

    def step(self) -> float:
        """Do what can be done now; how many seconds the next step may wait for a call."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def prefill(self, request: Request) -> None:
        """Compute the prompt and the first token after it."""
        logits = self.model.forward(request.prompt, 0, self.cache, request.block_ids)
        request.tokens = [int(logits.argmax())]

    def on_stats(self, body: Json, reply: Future[Json]) -> None:
        reply.set_result({**self.counts, "used_blocks": NUM_BLOCKS - self.blocks.num_free})


class PrefillEngine(Engine):
    """Computes prompts, and keeps their blocks until they were read."""

    def __init__(self, host: str) -> None:
        super().__init__(seed=1)
        self.kv = PrefillKv(self.cache, host)
        self.routes |= {"/prefill": self.on_prefill, "/cancel": self.on_cancel}
        self.waiting: deque[Request] = deque()
        self.offered: dict[str, Request] = {}

    def on_prefill(self, body: Json, reply: Future[Json]) -> None:
        self.waiting.append(Request.parse(body, reply))

    def on_cancel(self, body: Json, reply: Future[Json]) -> None:
        """Take an offer back, for a client that went away between the two engines."""
        req_id = body.get("req_id")
        if not isinstance(req_id, str) or req_id not in self.offered:
            raise ValueError(f"no request {req_id!r} is offered")
        self.kv.cancel(req_id)
        reply.set_result({})

    def step(self) -> float:
        for ended in self.kv.step():
            self.blocks.free(self.offered.pop(ended.req_id).block_ids)
            self.counts[f"leases_{ended.outcome}"] += 1
        if self.waiting:
            block_ids = self.blocks.allocate(self.waiting[0].num_prompt_blocks)
            if block_ids is not None:
                self.start(self.waiting.popleft(), block_ids)
                return 0
        return BUSY_WAIT_S if self.offered else IDLE_WAIT_S

    def start(self, request: Request, block_ids: list[int]) -> None:
        request.block_ids = block_ids
        self.prefill(request)
        req_id = uuid.uuid4().hex
        reference = self.kv.offer(req_id, block_ids, request.prompt)
        self.offered[req_id] = request
        request.reply.set_result(
            {
                "prompt": bytes(request.prompt).decode(),
                "max_tokens": request.max_tokens,
                "first_token": request.tokens[0],
                "req_id": req_id,
                "reference": reference,
            }
        )

    def close(self) -> None:
        self.kv.close()


class DecodeEngine(Engine):
    """Fetches the KV of prompts and decodes, one token of every running request a step."""

    def __init__(self, prefill_hosts: list[str]) -> None:
        super().__init__(seed=2)
        self.kv = DecodeKv(self.cache, prefill_hosts)
        self.routes |= {"/generate": self.on_generate}
        self.waiting: deque[Request] = deque()
        self.fetching: dict[str, Request] = {}
        self.running: list[Request] = []

    def on_generate(self, body: Json, reply: Future[Json]) -> None:
        try:
            request = Request.parse(body, reply)
            first_token = body.get("first_token")
            if not isinstance(first_token, int) or not 0 <= first_token < VOCABULARY:
                raise ValueError(f"first_token {first_token!r} is not a token")
        except ValueError:
            self.kv.release(body.get("reference"))
            raise
        request.reference, request.tokens = body.get("reference"), [first_token]
        self.waiting.append(request)

    def step(self) -> float:
        if self.waiting:
            block_ids = self.blocks.allocate(self.waiting[0].num_blocks)
            if block_ids is not None:
                self.start(self.waiting.popleft(), block_ids)
        for outcome in self.kv.step():
            self.continue_after(self.fetching.pop(outcome.req_id), outcome)
        for request in self.running:
            self.decode(request)
        self.running = [request for request in self.running if not request.reply.done()]
        if self.running:
            return 0
        return BUSY_WAIT_S if self.fetching else IDLE_WAIT_S

    def start(self, request: Request, block_ids: list[int]) -> None:
        request.block_ids = block_ids
        req_id = uuid.uuid4().hex
        self.fetching[req_id] = request
        prompt_blocks = block_ids[: request.num_prompt_blocks]
        self.kv.fetch(req_id, request.reference, prompt_blocks, request.prompt)

    def continue_after(self, request: Request, outcome: ReadOutcome) -> None:
        if outcome.verified:
            request.kv = "verified"
            request.bytes_read = outcome.num_bytes
            self.counts["verified_reads"] += 1
            self.counts["bytes_read"] += outcome.num_bytes
        else:
            request.kv = f"computed again, since the read failed: {outcome.reason}"
            self.counts["failed_reads"] += 1
            self.prefill(request)
        self.running.append(request)

    def decode(self, request: Request) -> None:
        if len(request.tokens) < request.max_tokens:
            position = len(request.prompt) + len(request.tokens) - 1
            logits = self.model.forward(
                request.tokens[-1:], position, self.cache, request.block_ids
            )
            request.tokens.append(int(logits.argmax()))
        else:
            self.blocks.free(request.block_ids)
            request.reply.set_result(
                {"tokens": request.tokens, "kv": request.kv, "bytes_read": request.bytes_read}
            )

    def close(self) -> None:
        self.kv.close()


# --- HTTP -----------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Passes the calls of HTTP clients to an engine; a thread a client."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, engine: Engine, host: str, port: int) -> None:
        self.engine = engine
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = CALL_TIMEOUT_S

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        try:
            length = int(self.headers["Content-Length"])
            if not 0 <= length <= MAX_BODY_BYTES:
                raise ValueError(f"bodies have at most {MAX_BODY_BYTES} bytes")
            body = json.loads(self.rfile.read(length))
            if not isinstance(body, dict):
                raise ValueError("the body must be a JSON object")
        except (TypeError, ValueError, RecursionError) as error:
            self.send(400, {"error": str(error)})
        else:
            self.answer(body)

    def answer(self, body: Json) -> None:
        if self.path not in self.server.engine.routes:
            self.send(404, {"error": f"there is no {self.path}"})
            return
        try:
            reply = self.server.engine.submit(self.path, body).result(CALL_TIMEOUT_S)
        except (ValueError, KvNixlError) as error:
            self.send(400, {"error": str(error)})
        except TimeoutError:
            self.send(504, {"error": f"not done after {CALL_TIMEOUT_S:g} s"})
        else:
            self.send(200, reply)

    def send(self, status: int, value: Json) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def call(url: str, path: str, body: Json | None = None) -> Json:
    """POST a JSON object, or GET if there is none; the answer's."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=CALL_TIMEOUT_S)
    with contextlib.closing(connection):
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        answer: Json = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(f"{url}{path} answered {response.status}: {answer['error']}")
        return answer


def serve(options: argparse.Namespace) -> None:
    """Run one role until SIGTERM, Ctrl-C, or the end of the process that started it."""
    torch.set_num_threads(1)
    engine: Engine
    if options.serve == "prefill":
        engine = PrefillEngine(options.host)
    else:
        engine = DecodeEngine(options.prefill_hosts)
    with contextlib.closing(engine), Server(engine, options.host, options.port) as server:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: engine.stop())
        if options.until_stdin_closes:
            threading.Thread(target=stop_when_stdin_closes, args=(engine,), daemon=True).start()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with contextlib.suppress(BrokenPipeError):  # nobody is left to read it
            print(f"{options.serve} listens on {server.url}", flush=True)
        try:
            engine.run()
        finally:
            server.shutdown()


def stop_when_stdin_closes(engine: Engine) -> None:
    while os.read(0, 4096):
        pass
    engine.stop()
    time.sleep(STOP_TIMEOUT_S + DRAIN_S)
    os._exit(1)  # the engine hangs, and nobody is left to notice


# --- the demonstration ----------------------------------------------------------------------------


class ServerProcess:
    """A role in a process of its own. It ends with this object, and with this process."""

    def __init__(self, role: str) -> None:
        self.role = role
        # In a session of its own Ctrl-C reaches this process only, which then ends that one.
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", role, "--port", "0", "--until-stdin-closes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.ready = False

    def wait_until_ready(self) -> str:
        """Its URL."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        output = b""
        while select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
            part = os.read(self.process.stdout.fileno(), 4096)
            output += part
            url = re.search(rb" listens on (\S+)\n", output)
            if url:
                self.ready = True
                return url[1].decode()
            if not part:
                break
        raise RuntimeError(f"the {self.role} process did not start; it said {output!r}")

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        if not self.ready:
            self.process.kill()  # it does not listen yet, to its standard input neither
        try:
            status = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the {self.role} process did not stop") from None
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
        if self.ready and status:
            raise RuntimeError(f"the {self.role} process ended with status {status}")


TEXT = "A prefill engine offers its blocks; a decode engine reads them and proves the read. " * 5


def prompts() -> list[str]:
    """Prompts with lengths around the block boundaries."""
    block = CONFIG.block_size
    lengths = [1, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1, 100, 333]
    return [TEXT[start : start + length] for start, length in enumerate(lengths)]


def rotated(reference: Json) -> Json:
    """The reference with every block id in its neighbour's place."""
    (ids,) = reference["remote_block_ids"]
    return {**reference, "remote_block_ids": [ids[1:] + ids[:1]]}


class Client:
    """Sends prompts through both engines, as a router would."""

    def __init__(self, prefill_url: str, decode_url: str, max_tokens: int) -> None:
        self.prefill_url = prefill_url
        self.decode_url = decode_url
        self.max_tokens = max_tokens

    def ask(self, prompt: str, *, rotate: bool = False, too_late: bool = False) -> Json:
        """The decode engine's answer.

        Args:
            rotate: have the blocks read in the wrong order.
            too_late: have them read when they were given up and hold something else.
        """
        kv = self.prefill(prompt, self.max_tokens)
        if rotate:
            kv["reference"] = rotated(kv["reference"])
        if too_late:
            self.cancel(kv)
            every_block = "x" * (NUM_BLOCKS * CONFIG.block_size - 1)
            self.cancel(self.prefill(every_block, 1))
        return call(self.decode_url, "/generate", kv)

    def prefill(self, prompt: str, max_tokens: int) -> Json:
        return call(self.prefill_url, "/prefill", {"prompt": prompt, "max_tokens": max_tokens})

    def cancel(self, kv: Json) -> None:
        call(self.prefill_url, "/cancel", {"req_id": kv["req_id"]})

    def stats(self) -> dict[str, Json]:
        """Both engines' counts, once neither uses a block, or after a while."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            stats = {
                "prefill": call(self.prefill_url, "/stats"),
                "decode": call(self.decode_url, "/stats"),
            }
            if time.monotonic() > deadline or not any(s["used_blocks"] for s in stats.values()):
                return stats
            time.sleep(0.01)


def demonstrate(max_tokens: int, rotate_blocks: bool) -> bool:
    """Run and print everything; whether all was as it should be."""
    started = time.monotonic()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(contextlib.closing(ServerProcess(role)))
            for role in ("prefill", "decode")
        )
        model = Transformer(CONFIG)
        expected = {prompt: generate(model, prompt.encode(), max_tokens) for prompt in prompts()}
        client = Client(prefill.wait_until_ready(), decode.wait_until_ready(), max_tokens)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda text: client.ask(text, rotate=rotate_blocks), expected))

        print("prompt  blocks  bytes read  KV        tokens")
        for (prompt, tokens), answer in zip(expected.items(), answers, strict=True):
            verdict = "equal to" if answer["tokens"] == tokens else "DIFFERENT from"
            print(
                f"{len(prompt):6}  {blocks_for(len(prompt), CONFIG.block_size):6}  "
                f"{answer['bytes_read']:10}  {answer['kv']}  {len(answer['tokens'])}, {verdict} "
                "the single process's"
            )
        longest = prompts()[-1]
        wrong_order = client.ask(longest, rotate=True)
        too_late = client.ask(longest, too_late=True)
        print(f"blocks used for another prompt before they were read: {too_late['kv']}")
        stats = client.stats()
        for role, counts in stats.items():
            print(f"{role}: {', '.join(f'{name} {count}' for name, count in counts.items())}")

    checks = {
        "every answer equals the single process's": (
            [answer["tokens"] for answer in answers] == list(expected.values())
        ),
        "every read was verified": all(answer["kv"] == "verified" for answer in answers),
        "blocks in the wrong order give other tokens": (
            wrong_order["kv"] == "verified" and wrong_order["tokens"] != expected[longest]
        ),
        "blocks that were read too late are noticed, and the answer is still right": (
            too_late["kv"] != "verified" and too_late["tokens"] == expected[longest]
        ),
        "every lease ended, and no block is left in use": (
            stats["prefill"].get("leases_read") == stats["decode"].get("verified_reads")
            and not any(counts["used_blocks"] for counts in stats.values())
        ),
    }
    for check, passed in checks.items():
        print(f"{'ok' if passed else 'FAILED'}: {check}")
    print(f"{time.monotonic() - started:.1f} s")
    return all(checks.values())


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Prefill and decode in two processes, with kvnixl between them."
    )
    parser.add_argument("--serve", choices=["prefill", "decode"], help="run one role until Ctrl-C")
    parser.add_argument("--host", default=HOST, help="address to serve on (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to serve on; 0 takes a free one")
    parser.add_argument(
        "--prefill-hosts",
        nargs="+",
        default=[HOST],
        help="hosts that the decode role may read from (%(default)s)",
    )
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="stop when the standard input ends"
    )
    parser.add_argument("--max-tokens", type=int, default=24, help="per answer (%(default)s)")
    parser.add_argument(
        "--rotate-blocks",
        action="store_true",
        help="read all blocks in the wrong order, to see the comparison fail",
    )
    options = parser.parse_args()
    try:
        if options.serve:
            serve(options)
            return 0
        return 0 if demonstrate(options.max_tokens, options.rotate_blocks) else 1
    except KeyboardInterrupt:
        return 130
    except (OSError, RuntimeError, KvNixlError) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
