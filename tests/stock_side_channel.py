"""vLLM's own side channel, driven over stdin and stdout. Runs in an interpreter that has vLLM.

One JSON list ``[command, options]`` per line in, one line ``REPLY <JSON>`` out; bytes as
hexadecimal text. The scheduler and worker objects are vLLM's, made without their constructors,
which would need a model.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata as nixl_metadata


class Listener:
    """A stock scheduler's handshake listener."""

    def __init__(self, compat_hash: str, ranks: list[list[int]], fields: dict[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        scheduler = object.__new__(base_scheduler.NixlBaseConnectorScheduler)
        scheduler._nixl_handshake_listener_t = None
        scheduler._stop_event = threading.Event()
        scheduler.side_channel_host = "127.0.0.1"
        scheduler.side_channel_port = self.port
        encode = base_scheduler.msgspec.msgpack.encode
        payloads = {}
        for pp_rank, tp_rank in ranks:
            exported = nixl_metadata.NixlAgentMetadata(
                **{**fields, "agent_metadata": b"rank %d %d" % (pp_rank, tp_rank)}
            )
            payloads[pp_rank, tp_rank] = nixl_metadata.NixlHandshakePayload(
                compatibility_hash=compat_hash, agent_metadata_bytes=encode(exported)
            )
        scheduler.set_xfer_handshake_metadata(payloads)
        self.shutdown = scheduler.shutdown


def ask(
    port: int, compat_hash: str, engine_id: str, tp_size: int, pp_size: int, host: str
) -> dict[str, Any]:
    """A stock worker's handshake with every rank."""
    exported = []

    def add_remote_agent(metadata: Any, rank: int, *_: Any) -> str:
        exported.append(metadata)
        return f"agent {rank}"

    worker = object.__new__(base_worker.NixlBaseConnectorWorker)
    worker._is_csa_linear = False
    worker.use_host_buffer = True
    worker.transfer_topo = SimpleNamespace(
        handshake_target_ranks=lambda tp_size, dcp_size: list(range(tp_size))
    )
    worker.compat_hash = compat_hash
    worker.enforce_compat_hash = True
    worker.pcp_size = worker.dcp_size = 1
    worker.add_remote_agent = add_remote_agent
    try:
        names, offset = worker._nixl_handshake(
            host, port, tp_size, engine_id, remote_pp_size=pp_size
        )
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "names": [[*rank, name] for rank, name in names.items()],
        "offset": offset,
        "exported": [
            {
                **{
                    name: getattr(metadata, name)
                    for name in metadata.__dataclass_fields__
                    if name != "agent_metadata"
                },
                "agent_metadata": metadata.agent_metadata.hex(),
            }
            for metadata in exported
        ],
    }


def main() -> None:
    listeners: dict[int, Listener] = {}

    def listen(**options: Any) -> int:
        listener = Listener(**options)
        listeners[listener.port] = listener
        return listener.port

    commands = {
        "listen": listen,
        "shutdown": lambda port: listeners.pop(port).shutdown(),
        "ask": ask,
        "clock": time.perf_counter,
    }
    print("REPLY", json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, options = json.loads(line)
        print("REPLY", json.dumps(commands[name](**options)), flush=True)
    for listener in listeners.values():
        listener.shutdown()


if __name__ == "__main__":
    main()
