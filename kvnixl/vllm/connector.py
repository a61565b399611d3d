"""The class that vLLM makes, once in the scheduler and once in each worker. It only forwards."""

from __future__ import annotations

import logging
from typing import Any

from kvnixl.errors import KvNixlError
from kvnixl.vllm.adapter import (
    CACHE_HIT_SOURCE,
    EngineFacts,
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
    adopt_vllm_logging,
    check_vllm_version,
    required_kvcache_layout,
    transfer_groups,
    worker_rank,
)
from kvnixl.vllm.messages import KvNixlConnectorMetadata, KvNixlHandshakeMetadata
from kvnixl.vllm.options import ConnectorOptions
from kvnixl.vllm.scheduler import KvNixlScheduler
from kvnixl.vllm.stats import KvNixlPromMetrics, KvNixlStats
from kvnixl.vllm.worker import KvNixlWorker

__all__ = ["KvNixlConnector", "NixlConnector"]

logger = logging.getLogger(__name__)


class KvNixlConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM KV connector that pulls blocks over NIXL and verifies every read.

    Args:
        vllm_config: vLLM's configuration.
        role: scheduler or worker.
        kv_cache_config: vLLM's cache groups and tensors.

    Raises:
        ConfigError: vLLM's version, its configuration or an option is not supported.
    """

    if CACHE_HIT_SOURCE is not None:
        _cache_hit_source = CACHE_HIT_SOURCE

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        adopt_vllm_logging()
        check_vllm_version()
        facts = EngineFacts.read(vllm_config)
        options = ConnectorOptions.parse(facts.extra_config, dp_index=facts.dp_index)
        groups = transfer_groups(kv_cache_config)
        self._transfer_group_ids = tuple(group.index for group in groups)
        self._scheduler: KvNixlScheduler | None = None
        self._worker: KvNixlWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = KvNixlScheduler(facts, groups, options)
        else:
            self._worker = KvNixlWorker(vllm_config, facts, groups, options, worker_rank())

    # --- of the class ---------------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        options = ConnectorOptions.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return required_kvcache_layout(vllm_config, options.enable_cross_layers_blocks)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvNixlStats:
        return KvNixlStats() if data is None else KvNixlStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvNixlPromMetrics:
        return KvNixlPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Asked by vLLM 0.33: sleeping unmaps the cache, which stays registered with NIXL."""
        return False

    # --- scheduler ------------------------------------------------------------------------------

    @property
    def _schedules(self) -> KvNixlScheduler:
        assert self._scheduler is not None
        return self._scheduler

    def on_new_request(self, request: Any) -> None:
        self._schedules.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count = self._schedules.num_matched_tokens(request, num_computed_tokens)
        return count, bool(count)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups that are transferred: vLLM must not zero blocks that a READ is filling."""
        return self._transfer_group_ids

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._schedules.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvNixlConnectorMetadata:
        return self._schedules.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._schedules.update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._schedules.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._schedules.request_finished(request, block_ids)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KvNixlHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): exported for rank, exported in metadata.items()}
        )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KvNixlHandshakeMetadata]
    ) -> None:
        self._schedules.set_handshake_metadata(metadata)

    def has_pending_push_work(self) -> bool:
        """vLLM's question whether it must go on stepping without a request."""
        return self._scheduler is not None and self._scheduler.has_pending_work()

    # --- worker ---------------------------------------------------------------------------------

    @property
    def _works(self) -> KvNixlWorker:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._works.register_kv_caches(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        """Nothing: blocks are read from and into the KV cache itself."""

    def get_handshake_metadata(self) -> KvNixlHandshakeMetadata | None:
        return self._works.handshake_metadata()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        # Before the forward pass: see kvnixl.vllm.worker.
        self._works.bind(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._works.start_load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: reads end between steps, not inside one."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are read where they are."""

    def wait_for_save(self) -> None:
        """Nothing: see `save_kv_layer`."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return self._works.finish_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """vLLM's older question, which has no room for reads that failed.

        Raises:
            KvNixlError: one did; to leave that out would make its blocks count as read.
        """
        results = self._works.finish_step()
        if results.failed_recving:
            raise KvNixlError(
                f"reads of {sorted(results.failed_recving)} failed, which get_finished cannot say: "
                "use a vLLM that calls get_transfer_results (0.31 and later do)"
            )
        return results.finished_sending, results.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        """None, ever: failures are reported by request, which is unambiguous for models with
        several cache groups."""
        return set()

    def get_kv_connector_stats(self) -> KvNixlStats | None:
        """Asked of the workers and of the scheduler; vLLM adds them up."""
        return self._schedules.take_stats() if self._worker is None else self._worker.take_stats()

    def build_connector_worker_meta(self) -> Any:
        return self._works.worker_metadata()

    # --- both -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()


NixlConnector = KvNixlConnector
"""The name that vLLM users know. vLLM's own treatment of that name then applies here too."""
