"""Runs under an interpreter with vLLM 0.32: what its own NixlConnector makes of the same values.

Reads a JSON request from stdin and writes a JSON answer as the last line of stdout. kvnixl is
imported here too, for the hashes of real configurations; nothing needs its extensions.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Each model: keys on top of BASE_MODEL.
BASE_MODEL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "sliding": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 128,
    },
    "mla": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 8,
        "kv_lora_rank": 64,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "draft": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
    },
    "draft_with_layers": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "draft_vocab_size": 512,
    },
}
# Name -> (model, engine arguments, attention backend, transfer mode). "@draft" is a model's path.
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "dense": ("llama", {}, "CPU_ATTN", "pull"),
    "dense push": ("llama", {}, "CPU_ATTN", "push"),
    "another backend": ("llama", {}, "FLASH_ATTN", "pull"),
    "bfloat16": ("llama", {"dtype": "bfloat16"}, "CPU_ATTN", "pull"),
    "fp8 cache": ("llama", {"kv_cache_dtype": "fp8"}, "CPU_ATTN", "pull"),
    "revision": ("llama", {"revision": "abc"}, "CPU_ATTN", "pull"),
    "another block size": ("llama", {"block_size": 64}, "CPU_ATTN", "pull"),
    "two ranks": ("llama", {"tensor_parallel_size": 2}, "CPU_ATTN", "pull"),
    "no hybrid": ("llama", {"disable_hybrid_kv_cache_manager": True}, "CPU_ATTN", "pull"),
    "sliding window": ("sliding", {}, "CPU_ATTN", "pull"),
    "MLA": ("mla", {}, "CPU_MLA", "pull"),
    "MLA fp8": ("mla", {"kv_cache_dtype": "fp8"}, "CPU_MLA", "pull"),
    "n-gram": (
        "llama",
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 4,
            }
        },
        "CPU_ATTN",
        "pull",
    ),
    "EAGLE": (
        "llama",
        {
            "speculative_config": {
                "method": "eagle",
                "model": "@draft",
                "num_speculative_tokens": 2,
            }
        },
        "CPU_ATTN",
        "pull",
    ),
    "EAGLE-3 with layers, fp8": (
        "llama",
        {
            "kv_cache_dtype": "fp8",
            "speculative_config": {
                "method": "eagle3",
                "model": "@draft_with_layers",
                "num_speculative_tokens": 2,
            },
        },
        "CPU_ATTN",
        "pull",
    ),
    "MTP": (
        "mla",
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        "CPU_MLA",
        "pull",
    ),
}


def main() -> None:
    request = json.load(sys.stdin)
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever vLLM prints stays out of the answer
    with tempfile.TemporaryDirectory() as directory:
        os.environ.update(
            HF_HUB_OFFLINE="1",
            TRANSFORMERS_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            DO_NOT_TRACK="1",
            VLLM_HOST_IP="127.0.0.1",
            VLLM_LOGGING_LEVEL="ERROR",
            VLLM_CACHE_ROOT=f"{directory}/cache",
            VLLM_CONFIG_ROOT=f"{directory}/config",
        )
        import vllm

        answer = {
            "version": vllm.__version__,
            "protocol": describe_protocol(),
            "encoded": encode_with_stock(request["metadata"], request["payload_hash"]),
            "decoded": decode_with_stock(request["ours"]),
            "notifications": read_notifications_with_stock(request["notifications"]),
            "registration": exchange_registration_with_stock(request["registration"]),
            "heartbeat": send_heartbeat_with_stock(request["heartbeat_ids"]),
            "hashes": compare_hashes(Path(directory)),
        }
    print(json.dumps(answer), file=answers)


def describe_protocol() -> dict[str, Any]:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata

    classes = (
        metadata.NixlAgentMetadata,
        metadata.NixlHandshakePayload,
        metadata.HeartbeatInfo,
        metadata.RemoteMeta,
        metadata.ReqMeta,
    )
    return {
        "connector_version": metadata.NIXL_CONNECTOR_VERSION,
        "get_meta_msg": metadata.GET_META_MSG.decode(),
        "push_prefix": metadata.PUSH_REG_NOTIF_PREFIX.decode(),
        "fields": {
            value_class.__name__: [field.name for field in dataclasses.fields(value_class)]
            for value_class in classes
        },
        "connector_metadata": list(vars(metadata.NixlConnectorMetadata())),
    }


def encode_with_stock(fields: dict[str, Any], payload_hash: str) -> dict[str, str]:
    import msgspec
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata

    fields = dict(fields)
    fields["agent_metadata"] = bytes.fromhex(fields["agent_metadata"])
    fields["ssm_sizes"] = tuple(fields["ssm_sizes"])
    fields["packed_member_layouts"] = {
        name: tuple(layout) for name, layout in fields["packed_member_layouts"].items()
    }
    encoder = msgspec.msgpack.Encoder()
    encoded = encoder.encode(metadata.NixlAgentMetadata(**fields))
    payload = metadata.NixlHandshakePayload(payload_hash, encoded)
    return {
        "metadata": encoded.hex(),
        "payload": encoder.encode(payload).hex(),
        "get_meta": encoder.encode((metadata.GET_META_MSG, 3, 5)).hex(),
        "clock": encoder.encode(1234.5).hex(),
    }


def decode_with_stock(ours: dict[str, str]) -> dict[str, Any]:
    import msgspec
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata

    agent = msgspec.msgpack.decode(bytes.fromhex(ours["metadata"]), type=metadata.NixlAgentMetadata)
    payload = msgspec.msgpack.decode(
        bytes.fromhex(ours["payload"]), type=metadata.NixlHandshakePayload
    )
    question = msgspec.msgpack.decode(bytes.fromhex(ours["get_meta"]))
    fields = dataclasses.asdict(agent)
    fields["agent_metadata"] = fields["agent_metadata"].hex()
    return {
        "metadata": fields,
        "payload": [payload.compatibility_hash, payload.agent_metadata_bytes.hex()],
        "get_meta": [question[0].decode(), *question[1:]],
        "clock": msgspec.msgpack.decode(bytes.fromhex(ours["clock"])),
    }


def read_notifications_with_stock(notifications: list[str]) -> dict[str, Any]:
    """A stock pull worker that waits for three requests reads our text notifications."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )

    worker: Any = object.__new__(NixlPullConnectorWorker)
    waiting = {"cmpl-1": 0.0, "cmpl-2": 0.0, "a:b": 0.0}
    worker.transfer_topo = SimpleNamespace()
    worker.xfer_stats = SimpleNamespace(record_notification_after_expiry=lambda: None)
    worker.nixl_wrapper = SimpleNamespace(
        get_new_notifs=lambda: {"agent": [bytes.fromhex(text) for text in notifications]}
    )
    worker._reqs_to_send = dict(waiting)
    worker._reqs_to_process = set(waiting)
    worker._lease_extension = 30.0
    worker.consumer_notification_counts_by_req = defaultdict(int)
    worker.expected_consumer_notifications_by_req = {}
    finished = worker._get_new_notifs()
    return {
        "finished": sorted(finished),
        "extended": sorted(
            request_id for request_id, expiry in worker._reqs_to_send.items() if expiry > 0.0
        ),
        "counted": dict(worker.consumer_notification_counts_by_req),
    }


def exchange_registration_with_stock(registration: dict[str, Any]) -> dict[str, Any]:
    """A stock push worker sends a registration, and reads the one that we wrote."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import (
        NixlPushConnectorWorker,
    )

    sent: list[bytes] = []
    worker: Any = object.__new__(NixlPushConnectorWorker)
    worker._handshake_lock = threading.Lock()
    worker._remote_agents = {registration["fields"]["remote_engine_id"]: {(0, 0): "agent"}}
    worker.nixl_wrapper = SimpleNamespace(
        send_notif=lambda agent, notif_msg: sent.append(notif_msg)
    )
    worker._do_send_reg_notif(registration["fields"]["request_id"], registration["fields"])

    worker._pop_matching_finished_blocks = lambda request_id: None
    worker._pending_d_registrations = {}
    worker._handle_push_reg_notif(bytes.fromhex(registration["ours"]))
    return {"sent": sent[0].hex(), "read": worker._pending_d_registrations}


def send_heartbeat_with_stock(request_ids: list[str]) -> str:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        HeartbeatInfo,
        NixlConnectorMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )

    sent: list[bytes] = []
    worker: Any = object.__new__(NixlPullConnectorWorker)
    worker._remote_agents = {"prefill-0": {(0, 0): "agent"}}
    worker._engine_last_active = {}
    worker._hb_handshake_notif_only = False
    worker._ensure_handshake = lambda *arguments, **options: None
    worker.nixl_wrapper = SimpleNamespace(
        send_notif=lambda agent, notif_msg: sent.append(notif_msg)
    )
    step = NixlConnectorMetadata()
    step.heartbeat_by_engine["prefill-0"] = HeartbeatInfo(set(request_ids), "10.0.0.1", 5600, 1)
    worker._send_heartbeats(step)
    return sent[0].hex()


def compare_hashes(directory: Path) -> dict[str, Any]:
    """Both hashes of real configurations of tiny models, and the values they came from."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from kvnixl import compat

    # vLLM looks at each model class in a process of its own, which takes ten seconds a model.
    registry._run_in_subprocess = lambda function: function()
    for name, model in MODELS.items():
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps({**BASE_MODEL, **model}))

    results = {}
    for name, (model, options, backend, mode) in CASES.items():
        arguments = {"dtype": "float32", "block_size": 32, **options}
        speculative = arguments.get("speculative_config")
        if speculative is not None and speculative.get("model", "").startswith("@"):
            draft = str(directory / speculative["model"][1:])
            arguments["speculative_config"] = {**speculative, "model": draft}
        config = EngineArgs(
            model=str(directory / model),
            skip_tokenizer_init=True,
            max_model_len=1024,
            enforce_eager=True,
            **arguments,
        ).create_engine_config()
        factors = compat.compatibility_factors(config, backend, mode)
        results[name] = {
            "stock": metadata.compute_nixl_compatibility_hash(config, backend, mode),
            "kvnixl": compat.compute_nixl_compatibility_hash(config, backend, mode),
            "factors": factors,
        }
    return results


if __name__ == "__main__":
    main()
