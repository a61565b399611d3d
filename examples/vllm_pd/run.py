#!/usr/bin/env python3
"""Two vLLM servers, one for prefill and one for decode, with kvnixl between them and a router in
front, on this machine.

    python examples/vllm_pd/run.py        # a tiny model with random weights, on any machine
    python examples/vllm_pd/run.py --model Qwen/Qwen3-8B --devices 0 1 -- --max-model-len 8192

What follows ``--`` goes to both servers. Ctrl-C ends everything. README.md has more.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvnixl.bench.vllm_engines import ENVIRONMENT, free_port
from kvnixl.bench.vllm_model import TinyModel, make_model

HOST = "127.0.0.1"
TINY_MODEL = "tiny"
# The tiny model needs little memory, and the CPU backend wants blocks of a multiple of 32 tokens.
TINY_MODEL_ARGUMENTS = (
    *("--served-model-name", TINY_MODEL, "--max-model-len", "2048", "--max-num-seqs", "8"),
    *("--dtype", "float32", "--block-size", "32", "--kv-cache-memory-bytes", str(64 * 1024**2)),
    "--enforce-eager",
)
STOP_TIMEOUT_S = 20.0
POLL_S = 0.2
LOG_TAIL_LINES = 30
PROMPT = "All happy families are alike; each unhappy family is unhappy in its own way."
HINT = """
Try it:

  curl -s {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'

and then see what was transferred:

  curl -s {decode_url}/metrics | grep 'kvnixl_reads_total'
"""


class StartError(Exception):
    """A process did not become ready."""


class Process:
    """One of the three processes, with a log file of its own."""

    def __init__(self, name: str, command: Sequence[str], log_dir: Path, **env: str) -> None:
        self.name = name
        self.port = free_port()
        self.log_path = log_dir / f"{name}.log"
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--host", HOST, "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | env,
                # A group of its own, so that Ctrl-C reaches this script only, and so that
                # wait() reaches the processes which the server starts.
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def healthy(self) -> bool:
        """Whether it answers ``/health``.

        Raises:
            StartError: it has ended.
        """
        if self.ended:
            lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            raise StartError(
                f"{self.name} ended with exit code {self._process.returncode}; the end of "
                + "\n    ".join([f"{self.log_path}:", *lines])
            )
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def terminate(self) -> None:
        """Ask it to end; `wait` waits for that."""
        self._process.terminate()

    def wait(self, timeout: float) -> None:
        """Until it has ended, by force after `timeout` seconds; nothing it started is left then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, timeout))
        with contextlib.suppress(ProcessLookupError):  # nothing is left of the group
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def running(processes: list[Process]) -> Iterator[None]:
    """Ends the processes that are in the list by then, the last one first."""
    try:
        yield
    finally:
        # A second Ctrl-C would leave some behind.
        handlers = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
        until = time.monotonic() + STOP_TIMEOUT_S
        for process in processes:
            process.terminate()
        for process in reversed(processes):
            process.wait(until - time.monotonic())
        for number, handler in handlers.items():
            signal.signal(number, handler)


def wait_healthy(processes: Sequence[Process], timeout: float) -> None:
    """Wait until all of them answer.

    Raises:
        StartError: one has ended, or does not answer in time.
    """
    until = time.monotonic() + timeout
    waiting = list(processes)
    while waiting := [process for process in waiting if not process.healthy]:
        if time.monotonic() > until:
            names = " and ".join(process.name for process in waiting)
            logs = ", ".join(str(process.log_path) for process in waiting)
            raise StartError(f"{names} not ready after {timeout:g} s; see {logs}")
        time.sleep(POLL_S)


def server_command(options: argparse.Namespace, model: str) -> list[str]:
    """How to start a vLLM server; both get the same."""
    transfer: dict[str, Any] = {
        "kv_connector": "KvNixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    if options.connector_options:
        transfer["kv_connector_extra_config"] = options.connector_options
    return [
        # The same as `vllm serve`, but of the interpreter that runs this script.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--kv-transfer-config", json.dumps(transfer)),
        *(TINY_MODEL_ARGUMENTS if options.model is None else ()),
        *options.server_arguments,
    ]


def start_servers(options: argparse.Namespace, log_dir: Path, started: list[Process]) -> None:
    """Start the prefill and the decode server, and add them to `started`."""
    tiny = options.model is None
    model = str(make_model(options.model_dir, TinyModel())) if tiny else options.model
    command = server_command(options, model)
    for name, device in zip(("prefill", "decode"), options.devices or (None, None), strict=True):
        env = ENVIRONMENT | dict(os.environ) if tiny else {}
        env |= {
            # Where peers ask for an engine's memory. Every engine of a machine needs its own port.
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        if device is not None:
            env["CUDA_VISIBLE_DEVICES"] = device
        started.append(Process(name, command, log_dir, **env))


def router_command(prefill: Process, decode: Process) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"),
        *("--prefill", prefill.url, "--decode", decode.url, "--policy", "round_robin"),
        *("--prometheus-port", str(free_port())),
    ]


def check_installed() -> None:
    """
    Raises:
        StartError: vLLM or its router is missing.
    """
    for module, package in (("vllm", "vllm"), ("vllm_router", "vllm-router==0.1.17")):
        if importlib.util.find_spec(module) is None:
            raise StartError(f"{module} is not installed for {sys.executable}: install {package}")


def run(options: argparse.Namespace) -> None:
    check_installed()
    log_dir = options.log_dir
    log_dir.mkdir(parents=True, exist_ok=True)
    print(f"logs in {log_dir}; two vLLM servers take half a minute to start ...", flush=True)
    processes: list[Process] = []
    with running(processes):
        start_servers(options, log_dir, processes)
        wait_healthy(processes, options.timeout)
        prefill, decode = processes
        processes.append(Process("router", router_command(prefill, decode), log_dir))
        wait_healthy(processes, options.timeout)
        for process in processes:
            print(f"{process.name} {process.url}", flush=True)
        model = options.model or TINY_MODEL
        body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 16})
        url, decode_url = processes[-1].url, decode.url
        print(HINT.format(url=url, decode_url=decode_url, body=body), flush=True)
        print("Ctrl-C ends all three.", flush=True)
        while not (gone := [process.name for process in processes if process.ended]):
            time.sleep(POLL_S)
        raise StartError(f"{gone[0]} ended; see {log_dir / gone[0]}.log")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A prefill and a decode vLLM server with kvnixl between them, and a router.",
    )
    parser.add_argument("--model", help="model to serve (a tiny one, made here)")
    parser.add_argument(
        "--devices",
        nargs=2,
        metavar=("PREFILL", "DECODE"),
        help="CUDA_VISIBLE_DEVICES of each server, e.g. --devices 0 1 or --devices 0,1 2,3",
    )
    parser.add_argument(
        "--connector-options",
        type=json.loads,
        metavar="JSON",
        help='options of the connector, e.g. \'{"lease_verification": "require"}\'',
    )
    parser.add_argument("--log-dir", type=Path, help="where the logs go (a new directory)")
    parser.add_argument("--model-dir", type=Path, help="where the tiny model is kept (in the logs)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for the start (%(default)g)"
    )
    parser.add_argument(
        "server_arguments",
        nargs="*",
        metavar="-- ARGUMENT",
        help="arguments for both vLLM servers, after --",
    )
    options = parser.parse_args(arguments)
    options.log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="vllm-pd-"))
    options.model_dir = options.model_dir or options.log_dir
    return options


def main() -> int:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    # Also where the shell had SIGINT ignored, as it does for what runs in the background.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        run(parse_arguments(sys.argv[1:]))
    except KeyboardInterrupt:
        return 130
    except (OSError, StartError) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
