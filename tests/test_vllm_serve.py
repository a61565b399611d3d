"""`vllm serve` with kvnixl, as a user runs it: two servers, vllm-router in front, HTTP.

`examples/vllm_pd/run.py` starts them. The connector is named without a module path, so vLLM must
find it by the entry point of the installed package.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvnixl.bench.vllm_engines import Reference, prefill_params
from kvnixl.bench.vllm_model import TinyModel
from tests.vllm_pairs import ROOT, SharedEngines
from tests.vllm_python import vllm_python

# They come with vLLM.
psutil = pytest.importorskip("psutil")
prometheus = pytest.importorskip("prometheus_client.parser")
tokenizers = pytest.importorskip("tokenizers")

RUN = ROOT / "examples" / "vllm_pd" / "run.py"
START_TIMEOUT_S = 240.0
# Much shorter than the lease, so that blocks which are free by then did not expire.
WAIT_TIMEOUT_S = 60.0
CONFIG = "--kv-transfer-config"
LEASE_S = 300
MAX_TOKENS = 8

MakePrompt = Callable[[int], list[int]]


# --- the launcher alone ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launcher() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_pd_run", RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_server_that_cannot_start_is_reported_with_the_end_of_its_log(
    launcher: ModuleType, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    processes = [launcher.Process("decode", command, tmp_path)]
    with (
        launcher.running(processes),
        pytest.raises(launcher.StartError, match=r"(?s)decode ended with exit code 3.*no such mod"),
    ):
        launcher.wait_healthy(processes, WAIT_TIMEOUT_S)


def test_a_server_that_does_not_answer_is_named(launcher: ModuleType, tmp_path: Path) -> None:
    processes = [launcher.Process("prefill", [sys.executable, "-c", SLEEP], tmp_path)]
    with (
        launcher.running(processes),
        pytest.raises(launcher.StartError, match=r"prefill not ready after 0\.3 s; see .*\.log"),
    ):
        launcher.wait_healthy(processes, 0.3)
    assert processes[0].ended


def test_a_missing_router_is_named_before_anything_starts(
    launcher: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm_router" else object()
    )
    with pytest.raises(launcher.StartError, match=r"install vllm-router==0\.1\.17"):
        launcher.run(launcher.parse_arguments(["--log-dir", str(tmp_path)]))


SLEEP = "import time; time.sleep(600)"
# A server that does not end when asked, and has started another process.
STUBBORN = f"""
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
print(child.pid, flush=True)
child.wait()
"""


def test_nothing_outlives_the_launcher(
    launcher: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "STOP_TIMEOUT_S", 0.5)
    processes = [launcher.Process("decode", [sys.executable, "-c", STUBBORN], tmp_path)]
    with launcher.running(processes):
        wait_until(lambda: processes[0].log_path.read_text().endswith("\n"))
        child = psutil.Process(int(processes[0].log_path.read_text()))
        assert child.is_running()
    assert processes[0].ended
    wait_until(lambda: has_ended(child))


def has_ended(process: Any) -> bool:
    """Also if nobody has asked for its exit status yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], object], timeout: float = WAIT_TIMEOUT_S) -> None:
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, "not true in time"
        time.sleep(0.05)


# --- the servers ----------------------------------------------------------------------------------


class Servers:
    """`run.py` and what it started.

    Attributes:
        urls: of ``prefill``, ``decode`` and ``router``.
    """

    def __init__(self, log_dir: Path, model_dir: Path) -> None:
        self.urls: dict[str, str] = {}
        self._lines: list[str] = []
        self._ready: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [
                *(vllm_python(), str(RUN)),
                *("--log-dir", str(log_dir), "--model-dir", str(model_dir)),
                *("--timeout", str(START_TIMEOUT_S)),
                *("--connector-options", json.dumps({"kv_lease_duration": LEASE_S})),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # So that importing kvnixl from the working directory proves nothing.
            cwd=log_dir,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if found := re.fullmatch(r"(prefill|decode|router) (http://\S+)\n", line):
                self.urls[found[1]] = found[2]
            if line.startswith("Ctrl-C"):
                self._ready.put(True)
        self._ready.put(False)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def wait_ready(self) -> None:
        try:
            ready = self._ready.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            pytest.fail(f"not ready after {START_TIMEOUT_S:g} s: {self.output}")
        if not ready:
            pytest.fail(f"ended: {self.output}")

    def descendants(self) -> list[Any]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        if self.process.poll() is None:
            started = self.descendants()
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(WAIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
            for process in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    # --- HTTP ---

    def post(self, body: Mapping[str, Any], to: str = "router") -> tuple[int, str]:
        """Status and body of the answer to a completion request."""
        return self._request(to, "POST", "/v1/completions", json.dumps(body))

    def metrics(self, of: str) -> dict[tuple[str, str], float]:
        """(name, label value) -> value; the label is the metric's own, ``""`` without one."""
        status, page = self._request(of, "GET", "/metrics")
        assert status == 200, page
        found = {}
        for family in prometheus.text_string_to_metric_families(page):
            for sample in family.samples:
                own = [v for k, v in sample.labels.items() if k not in ("engine", "model_name")]
                found[sample.name, own[0] if own else ""] = sample.value
        return found

    def _request(self, to: str, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        address = urlsplit(self.urls[to]).netloc
        connection = http.client.HTTPConnection(address, timeout=WAIT_TIMEOUT_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, vllm_engines: SharedEngines
) -> Iterator[Servers]:
    vllm_engines.close_pair()  # stock engines keep a core busy
    model = vllm_engines.model(TinyModel())
    servers = Servers(tmp_path_factory.mktemp("vllm-pd"), model.parent)
    try:
        servers.wait_ready()
        yield servers
    finally:
        servers.close()


@pytest.fixture
def reference(vllm_reference: Callable[..., Reference]) -> Reference:
    return vllm_reference()


@pytest.fixture(scope="module")
def tokenizer(vllm_engines: SharedEngines) -> Any:
    return tokenizers.Tokenizer.from_file(str(vllm_engines.model(TinyModel()) / "tokenizer.json"))


@pytest.fixture
def make_text(make_prompt: MakePrompt) -> Callable[[int], str]:
    """As `make_prompt`, but letters, of which each is one token."""
    return lambda tokens: "".join(chr(ord("A") + number % 26) for number in make_prompt(tokens))


def body(prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    """A greedy completion request whose answer shows token ids."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def events(answer: str) -> list[dict[str, Any]]:
    """The choices of a streamed answer, chunk by chunk."""
    *chunks, last = (line.removeprefix("data: ") for line in answer.splitlines() if line)
    assert last == "[DONE]"
    return [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]


def complete(text: str) -> str:
    """Without an unfinished character at the end, which vLLM does not give out."""
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


class Progress:
    """What the servers count from now on."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._before = {name: servers.metrics(name) for name in ("prefill", "decode")}

    def of(self, name: str, metric: str, label: str = "") -> float:
        """How much a counter of vLLM's has grown."""
        key = (f"vllm:{metric}", label)
        return self._servers.metrics(name)[key] - self._before[name][key]

    def assert_transferred(self, num_requests: int, num_tokens: int) -> None:
        """So many requests, with so many prompt tokens, were read, verified, and nothing else."""
        wait_until(lambda: self.of("prefill", "kvnixl_leases_ended_total", "read") == num_requests)
        assert self.of("prefill", "kvnixl_leases_total") == num_requests
        assert self.of("decode", "kvnixl_reads_total", "verified") == num_requests
        for result in ("unverified", "rejected", "failed"):
            assert self.of("decode", "kvnixl_reads_total", result) == 0
        assert self.of("decode", "external_prefix_cache_hits_total") == num_tokens
        by_source = "prompt_tokens_by_source_total"
        assert self.of("decode", by_source, "external_kv_transfer") == num_tokens
        assert self.of("decode", by_source, "local_compute") == 0


@pytest.fixture
def progress(servers: Servers) -> Progress:
    return Progress(servers)


@pytest.mark.vllm
@pytest.mark.timeout(330)
class TestServers:
    def test_vllm_finds_the_connector_by_its_name(self, servers: Servers) -> None:
        commands = []
        for process in servers.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                commands.append(process.cmdline())
        configs = [line[line.index(CONFIG) + 1] for line in commands if CONFIG in line]
        assert len(configs) == 2
        for config in configs:
            assert json.loads(config)["kv_connector"] == "KvNixlConnector"
            assert "kv_connector_module_path" not in json.loads(config)

    def test_a_request_that_the_decode_server_refuses_leaves_no_blocks_behind(
        self, servers: Servers, progress: Progress, make_prompt: MakePrompt
    ) -> None:
        """The prefill server, which is asked for a single token, accepts it. The first test: the
        decode server has not met the prefill server yet."""
        assert servers.metrics("decode")["vllm:kvnixl_remotes_total", "met"] == 0
        status, answer = servers.post(body(make_prompt(200), max_tokens=5000))
        assert status == 400
        assert "max_tokens=5000" in answer
        wait_until(lambda: progress.of("prefill", "kvnixl_leases_ended_total", "released") == 1)
        assert progress.of("prefill", "kvnixl_leases_total") == 1
        now = servers.metrics("prefill")
        assert now["vllm:kvnixl_leases_held", ""] == 0
        assert now["vllm:kvnixl_leases_ended_total", "expired"] == 0
        assert now["vllm:kv_cache_usage_perc", ""] == 0
        assert progress.of("decode", "kvnixl_reads_total", "verified") == 0

    def test_text(
        self,
        servers: Servers,
        progress: Progress,
        reference: Reference,
        tokenizer: Any,
        make_text: Callable[[int], str],
    ) -> None:
        text = make_text(200)
        status, answer = servers.post(body(text))
        assert status == 200, answer
        (choice,) = json.loads(answer)["choices"]
        expected = reference.tokens(list(text.encode()), MAX_TOKENS)
        assert tuple(choice["token_ids"]) == expected
        assert complete(choice["text"]) == complete(tokenizer.decode(list(expected)))
        progress.assert_transferred(1, 200)

    def test_token_ids(
        self, servers: Servers, progress: Progress, reference: Reference, make_prompt: MakePrompt
    ) -> None:
        prompt = make_prompt(333)
        status, answer = servers.post(body(prompt))
        assert status == 200, answer
        (choice,) = json.loads(answer)["choices"]
        assert tuple(choice["token_ids"]) == reference.tokens(prompt, MAX_TOKENS)
        progress.assert_transferred(1, 333)

    def test_streaming(
        self,
        servers: Servers,
        progress: Progress,
        reference: Reference,
        tokenizer: Any,
        make_text: Callable[[int], str],
    ) -> None:
        text = make_text(100)
        status, answer = servers.post(body(text, stream=True))
        assert status == 200, answer
        # However many: vLLM puts tokens that wait to be sent into one chunk.
        choices = events(answer)
        expected = reference.tokens(list(text.encode()), MAX_TOKENS)
        assert tuple(token for choice in choices for token in choice["token_ids"]) == expected
        streamed = "".join(choice["text"] for choice in choices)
        assert complete(streamed) == complete(tokenizer.decode(list(expected)))
        progress.assert_transferred(1, 100)

    def test_several_prompts_in_one_request(
        self, servers: Servers, progress: Progress, reference: Reference, make_prompt: MakePrompt
    ) -> None:
        """The prefill server answers with the parameters of the first prompt only, and the decode
        server gives them to all."""
        prompts = [make_prompt(tokens) for tokens in (65, 50, 64)]
        for _ in range(2):  # the second time, nothing of the first prompt is missing
            ask = body(prompts, max_tokens=1, kv_transfer_params=prefill_params())
            status, answer = servers.post(ask, "prefill")
            assert status == 200, answer
            params = json.loads(answer)["kv_transfer_params"]
            status, answer = servers.post(body(prompts, kv_transfer_params=params), "decode")
            assert status == 200, answer
            for prompt, choice in zip(prompts, json.loads(answer)["choices"], strict=True):
                # Of the first, all but the last token are there.
                expected = reference.tokens(prompt, MAX_TOKENS, decode_last=prompt is prompts[0])
                assert tuple(choice["token_ids"]) == expected
        decisions = ("pull", "local_hit", "other_prompt")
        counted = [
            progress.of("decode", "kvnixl_pull_decisions_total", decision) for decision in decisions
        ]
        assert counted == [1, 1, 4]
        assert progress.of("decode", "kvnixl_reads_total", "verified") == 1

    def test_several_requests_at_once(
        self, servers: Servers, progress: Progress, reference: Reference, make_prompt: MakePrompt
    ) -> None:
        prompts = [make_prompt(tokens) for tokens in (33, 500, 64, 129, 1000, 40, 300, 77)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: servers.post(body(prompt)), prompts))
        for prompt, (status, answer) in zip(prompts, answers, strict=True):
            assert status == 200, answer
            (choice,) = json.loads(answer)["choices"]
            assert tuple(choice["token_ids"]) == reference.tokens(prompt, MAX_TOKENS)
        progress.assert_transferred(len(prompts), sum(map(len, prompts)))

    def test_the_metrics_page_shows_every_documented_metric(
        self, servers: Servers, progress: Progress, make_prompt: MakePrompt
    ) -> None:
        status, answer = servers.post(body(make_prompt(64)))
        assert status == 200, answer
        progress.assert_transferred(1, 64)
        documented = set(
            re.findall(r"`(vllm:kvnixl_\w+)`", (ROOT / "docs/vllm-metrics.md").read_text())
        )
        assert len(documented) > 30
        for name in ("prefill", "decode"):
            shown = {re.sub(r"_(count|sum|bucket)$", "", key) for key, _ in servers.metrics(name)}
            assert documented <= shown
        decode, prefill = servers.metrics("decode"), servers.metrics("prefill")
        for metric, label in (
            ("kvnixl_reads_total", "verified"),
            ("kvnixl_read_bytes_total", ""),
            ("kvnixl_read_seconds_count", ""),
            ("kvnixl_read_seconds_sum", ""),
            ("kvnixl_read_stage_seconds_count", "verifying"),
            ("kvnixl_read_size_bytes_count", ""),
            ("kvnixl_read_descriptors_sum", ""),
            ("kvnixl_handshakes_total", "done"),
            ("kvnixl_pull_decisions_total", "pull"),
            ("kvnixl_ranks", ""),
        ):
            assert decode[f"vllm:{metric}", label] > 0, metric
        for metric, label in (
            ("kvnixl_leases_total", ""),
            ("kvnixl_leases_ended_total", "read"),
            ("kvnixl_completions_total", ""),
            ("kvnixl_lease_grants_total", "granted"),
            ("kvnixl_ranks", ""),
        ):
            assert prefill[f"vllm:{metric}", label] > 0, metric
        for page in (prefill, decode):
            assert page["vllm:kvnixl_telemetry_errors_total", ""] == 0
            assert page["vllm:kvnixl_producer_errors_total", "internal"] == 0

    def test_ctrl_c_ends_everything(self, servers: Servers) -> None:
        """The last test: nothing is left to ask after it."""
        started = servers.descendants()
        assert len(started) >= 5  # two API servers, their engines, and the router
        servers.process.send_signal(signal.SIGINT)
        assert servers.process.wait(WAIT_TIMEOUT_S) == 130, servers.output
        wait_until(lambda: all(map(has_ended, started)))
