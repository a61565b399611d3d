"""Print what a client gets when a lease expires while its blocks wait or are read.

Real vLLM engines, once with vLLM's own NixlConnector and once with kvnixl: the decoding engine
stands still (SIGSTOP) for longer than the lease, meanwhile the prefilling one gives the blocks to
other prompts. The tokens are compared with those of a single engine.

    python scripts/compare_expiry.py [--rounds 3]

Needs vLLM 0.32 in the running interpreter. Asserts nothing: this is a comparison, not a test.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from kvnixl.bench.vllm_engines import (  # noqa: E402
    Engine,
    EngineSpec,
    EngineTemplate,
    Generated,
    Pair,
    Reference,
)
from kvnixl.bench.vllm_model import TinyModel, make_model  # noqa: E402
from tests import vllm_fault_hooks as hooks  # noqa: E402

LEASE_S = 1.0
PROMPT, TOKENS = 1900, 8
CONNECTORS: dict[str, dict[str, Any]] = {
    "NixlConnector": {"kv_connector": "NixlConnector"},
    "KvNixlConnector": {
        "kv_connector": "KvNixlConnector",
        "kv_connector_module_path": "kvnixl.vllm",
    },
}


def specs(model: Path, connector: dict[str, Any]) -> tuple[EngineSpec, EngineSpec]:
    config = connector | {
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }
    return (
        # A small cache, which a few other prompts fill.
        EngineSpec(model, config, {"kv_cache_memory_bytes": 17 << 20}, name="prefill"),
        EngineSpec(model, config, env={"UCX_TLS": "tcp"}, name="decode"),
    )


def fresh_prompt() -> list[int]:
    return [random.randrange(1, 250) for _ in range(PROMPT)]


def stand_still(pair: Pair, moment: str, prompt: list[int]) -> Generated:
    """Decode a prompt in an engine that is stopped before or during its read."""
    params = pair.run_prefill(prompt).kv_transfer_params
    decode = pair.decode
    if moment == "before the read":
        decode.pause()
        generation = decode.submit(prompt, TOKENS, kv_transfer_params=params)
        decode.call(hooks.num_requests)  # it has the request
        decode.freeze()
    else:
        pair.prefill.freeze()  # or the READ could be over before the other stands still
        decode.call(hooks.stop_in_next_read)
        generation = decode.submit(prompt, TOKENS, kv_transfer_params=params)
        wait_stopped(decode)
        pair.prefill.thaw()
    pair.prefill.wait_blocks_in_use(0)
    for _ in range(2):
        pair.prefill.generate(fresh_prompt(), 1)
    decode.thaw()
    decode.resume()
    return generation.result()


def wait_stopped(engine: Engine) -> None:
    until = time.monotonic() + 20
    stat = Path(f"/proc/{engine.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        if time.monotonic() > until:
            raise TimeoutError(f"{engine.name} did not stop itself")
        time.sleep(0.001)
    engine.freeze()


def verdict(reference: Reference, prompt: list[int], answer: Generated) -> str:
    if answer.finish_reason != "length":
        return f"no tokens, finish_reason {answer.finish_reason!r}"
    right = any(
        answer.token_ids == reference.tokens(prompt, TOKENS, decode_last=decode_last)
        for decode_last in (True, False)
    )
    source = "recomputed" if not answer.num_external_tokens else "from the other engine's blocks"
    return f"{'right' if right else 'WRONG'} tokens ({source}), finish_reason 'length'"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of each case (default: 3)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work_dir = Path(directory)
        model = make_model(work_dir, TinyModel())
        with EngineTemplate(work_dir, import_paths=[ROOT]) as template:
            plain = EngineSpec(model, name="reference", forces_tokens=True)
            reference = Reference(template.start(plain))
            for name, connector in CONNECTORS.items():
                prefill, decode = (template.start(spec) for spec in specs(model, connector))
                pair = Pair(prefill, decode)
                with prefill, decode:
                    pair.handoff(fresh_prompt(), 1)  # they have met
                    for moment in ("before the read", "during the read"):
                        for _ in range(arguments.rounds):
                            prompt = fresh_prompt()
                            answer = stand_still(pair, moment, prompt)
                            said = verdict(reference, prompt, answer)
                            print(f"{name:16} stopped {moment}: {said}", flush=True)


if __name__ == "__main__":
    main()
