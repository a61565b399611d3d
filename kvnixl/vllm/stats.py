"""What the connector counts, in vLLM's own statistics: log line and Prometheus.

Each worker rank, and the scheduler, has one `StatsCollector`. What changed since the last step goes
as a `KvNixlStats` from there to vLLM's front end, is added up over ranks on the way, and ends in
vLLM's periodic log line (`KvNixlStats.reduce`) and in Prometheus (`KvNixlPromMetrics`). `METRICS`
declares everything that is counted; ``docs/vllm-metrics.md`` says how to read it.

Two rules. Every number counts *ranks*: with tensor parallelism each rank reads and holds its own
part of a request, so a request that four ranks read is four reads; the gauge ``ranks`` gives the
divisor. And nothing here decides anything: what goes wrong while recording is counted as
``telemetry_errors``, logged once, and otherwise ignored.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Final, Literal, ParamSpec, TypeVar, get_args

import numpy as np
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvnixl.outcomes import FailureCause, ReaderCounters, ReadOutcome, Stage
from kvnixl.producer import ProducerCounters

if TYPE_CHECKING:
    from kvnixl.outcomes import Telemetry

__all__ = [
    "METRICS",
    "KvNixlPromMetrics",
    "KvNixlStats",
    "Metric",
    "StatsCollector",
    "cause_label",
]

logger = logging.getLogger(__name__)

PREFIX: Final = "vllm:kvnixl_"
"""Of all names in Prometheus. vLLM takes care of metrics whose names begin with ``vllm:``."""

MAX_SAMPLES: Final = 1 << 14
"""Values kept of one histogram until they are taken; more are dropped and counted."""

# From half a shared-memory copy to a transfer that times out.
_SECONDS_BUCKETS: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_BYTES_BUCKETS: Final = tuple(float(4**power) for power in range(6, 19))  # 4 KiB to 64 GiB
_DESCS_BUCKETS: Final = tuple(float(4**power) for power in range(10))  # 1 to 262 144

_STAGES: Final = {
    Stage.HANDSHAKE: "handshake",
    Stage.QUEUED: "queued",
    Stage.READING: "reading",
    Stage.VERIFYING: "verifying",
}
_CAUSES: Final = {
    cause: {FailureCause.LEASE_ENDED: "verification"}.get(cause, cause.name.lower())
    for cause in FailureCause
}
# HandshakeClient.outcomes -> label; other names are "other".
_HANDSHAKE_CAUSES: Final = {
    "CompatibilityError": "mismatch",
    "EngineIdMismatchError": "engine_id",
    "IncarnationChangedError": "restarted",
    "HandshakeRefusedError": "refused",
    "HandshakeReplyError": "malformed",
    "HandshakeTimeoutError": "timeout",
    "HandshakeConnectError": "connect",
    "HostResolutionError": "host",
    "RemoteNotAllowedError": "not_allowed",
}


PullDecision = Literal[
    "pull",
    "local_hit",
    "below_threshold",
    "already_read",
    "window_edge",
    "other_prompt",
    "not_taken",
    "given_up",
    "refused",
]


def cause_label(cause: FailureCause) -> str:
    """How a cause of failure is called in metrics."""
    return _CAUSES[cause]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        kind: what it is to Prometheus.
        meaning: the help text.
        label, values: name of its label and all values of that, if it has one.
        buckets: upper bounds of a histogram.
    """

    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()


def _counter(meaning: str, label: str = "", values: tuple[str, ...] = ("",)) -> Metric:
    return Metric("counter", meaning, label, values)


def _histogram(
    meaning: str, buckets: tuple[float, ...], label: str = "", values: tuple[str, ...] = ("",)
) -> Metric:
    return Metric("histogram", meaning, label, values, buckets)


METRICS: Final[dict[str, Metric]] = {
    # consumer
    "reads_total": _counter(
        "Requests whose read ended, per rank.",
        "result",
        ("verified", "unverified", "empty", "rejected", "failed", "aborted"),
    ),
    "read_failures_total": _counter(
        "Reads that were rejected or failed, by cause.", "cause", tuple(_CAUSES.values())
    ),
    "read_bytes_total": _counter("Bytes of verified and unverified reads."),
    "descriptors_before_merging_total": _counter(
        "Descriptors that reads asked for, of reads that know both numbers."
    ),
    "descriptors_after_merging_total": _counter(
        "Descriptors that were posted for them, of reads that know both numbers."
    ),
    "read_seconds": _histogram(
        "Time from arrival to outcome of verified and unverified reads.", _SECONDS_BUCKETS
    ),
    "read_stage_seconds": _histogram(
        "Time that verified and unverified reads spent in a stage.",
        _SECONDS_BUCKETS,
        "stage",
        tuple(_STAGES.values()),
    ),
    "read_size_bytes": _histogram("Bytes of a verified or unverified read.", _BYTES_BUCKETS),
    "read_descriptors": _histogram(
        "Descriptors, after merging, of a verified or unverified read.", _DESCS_BUCKETS
    ),
    "transfer_seconds": _histogram(
        "Time from posting to completion of a NIXL transfer.", _SECONDS_BUCKETS
    ),
    "transfer_post_seconds": _histogram(
        "Time that NIXL took to post a transfer.", _SECONDS_BUCKETS
    ),
    "handshakes_total": _counter("Handshakes that ended.", "result", ("done", "failed")),
    "handshake_failures_total": _counter(
        "Handshakes that failed, by cause.", "cause", (*_HANDSHAKE_CAUSES.values(), "other")
    ),
    "remotes_total": _counter(
        "Attempts to load a remote engine that ended.", "result", ("met", "not_met")
    ),
    "remotes_retired_total": _counter(
        "Remote engines that were given up.", "cause", ("error", "idle")
    ),
    "notifications_total": _counter("Notifications that were sent by themselves."),
    "notification_failures_total": _counter(
        "Notifications that were not sent.", "cause", ("not_sent", "inexpressible")
    ),
    # producer
    "leases_total": _counter("Requests that were held for readers, per rank."),
    "leases_ended_total": _counter(
        "Held requests that ended.", "outcome", ("read", "released", "expired", "aborted")
    ),
    "lease_renewals_total": _counter("Heartbeats that extended a lease."),
    "completions_total": _counter("Readers' completions that counted for a held request."),
    "completions_failed_total": _counter("Completions of readers that tried and failed."),
    "completions_early_total": _counter("Completions that came before the request was held."),
    "completions_ignored_total": _counter(
        "Readers' completions that ended nothing, by cause.",
        "cause",
        ("duplicate", "late", "unknown", "dropped", "refused"),
    ),
    "notifications_ignored_total": _counter(
        "Other notifications that did nothing, by cause.",
        "cause",
        ("malformed", "push_registration", "unknown_renewal"),
    ),
    "producer_errors_total": _counter(
        "Errors of the producer itself.", "cause", ("drain", "internal")
    ),
    # scheduler
    "lease_grants_total": _counter(
        "Finished prefills, by whether a lease slot was free.", "result", ("granted", "no_slot")
    ),
    "pull_decisions_total": _counter(
        "Requests with a remote prefill, by what the scheduler decided.",
        "decision",
        get_args(PullDecision),
    ),
    # of this module
    "telemetry_errors_total": _counter("Errors while recording statistics."),
    "telemetry_dropped_total": _counter("Values that histograms do not show."),
    # now
    "ranks": Metric("gauge", "Worker ranks that report."),
    "leases_held": Metric("gauge", "Requests held for readers now, summed over ranks."),
    "reads_in_progress": Metric("gauge", "Reads without an outcome now, summed over ranks."),
    "reads_overdue": Metric(
        "gauge", "Reads past their deadline whose blocks bytes may still land in."
    ),
    "quarantined_cells": Metric(
        "gauge", "Landing cells that NIXL may still write, out of use for now."
    ),
    "quarantined_handles": Metric("gauge", "NIXL objects that could not be given back yet."),
}
"""Everything that is counted, by its name without `PREFIX`."""

# Field of ProducerCounters -> (metric, label value).
_PRODUCER: Final = {
    "held": ("leases_total", ""),
    "read": ("leases_ended_total", "read"),
    "released": ("leases_ended_total", "released"),
    "expired": ("leases_ended_total", "expired"),
    "aborted": ("leases_ended_total", "aborted"),
    "completions": ("completions_total", ""),
    "failed_completions": ("completions_failed_total", ""),
    "early_completions": ("completions_early_total", ""),
    "duplicate_completions": ("completions_ignored_total", "duplicate"),
    "late_completions": ("completions_ignored_total", "late"),
    "unknown_completions": ("completions_ignored_total", "unknown"),
    "dropped_completions": ("completions_ignored_total", "dropped"),
    "refused_completions": ("completions_ignored_total", "refused"),
    "heartbeats": ("lease_renewals_total", ""),
    "unknown_heartbeats": ("notifications_ignored_total", "unknown_renewal"),
    "malformed": ("notifications_ignored_total", "malformed"),
    "push_registrations": ("notifications_ignored_total", "push_registration"),
    "drain_errors": ("producer_errors_total", "drain"),
    "internal_errors": ("producer_errors_total", "internal"),
}
# Field of ReaderCounters -> (metric, label value).
_READER: Final = {
    "notifications": ("notifications_total", ""),
    "notifications_failed": ("notification_failures_total", "not_sent"),
    "notifications_inexpressible": ("notification_failures_total", "inexpressible"),
    "remotes_met": ("remotes_total", "met"),
    "remotes_not_met": ("remotes_total", "not_met"),
    "remotes_evicted": ("remotes_retired_total", "idle"),
}
# Fields of ReaderCounters that record_outcome counts with more detail, or that need arithmetic.
_READER_ELSEWHERE: Final = frozenset(
    {"verified", "unverified", "failed", "aborted", "bytes_read", "descs_posted"}
    | {"remotes_retired"}
)

_Counts = dict[str, dict[str, float]]  # metric -> label value -> count
_Samples = dict[str, dict[str, list[float]]]  # metric -> label value -> observed values
_Gauges = dict[str, dict[str, float]]  # who reports -> metric -> value

_P = ParamSpec("_P")
_R = TypeVar("_R")
_logged: set[str] = set()


def _log_once(where: str) -> None:
    """Log the exception that is being handled, the first time that it comes from there."""
    if where not in _logged:
        _logged.add(where)
        logger.warning(
            "statistics are incomplete: %s failed (transfers are not affected; said once)",
            where,
            exc_info=True,
        )


def _never_raises(
    method: Callable[Concatenate[StatsCollector, _P], _R],
) -> Callable[Concatenate[StatsCollector, _P], _R | None]:
    """Telemetry must never fail what it watches."""

    @functools.wraps(method)
    def guarded(self: StatsCollector, /, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            self.errors += 1
            _log_once(f"StatsCollector.{method.__name__}")
            return None

    return guarded


def _nothing() -> dict[str, Any]:
    return {"counters": {}, "samples": {}, "gauges": {}}


class KvNixlStats(KVConnectorStats):
    """What one or more ranks counted during one or more steps.

    ``data`` is plain values only, since it travels by pickle and msgpack::

        {"counters": {metric: {label value: increase}},
         "samples": {metric: {label value: [observed, ...]}},
         "gauges": {who reports: {metric: value}}}

    `aggregate` adds increases and joins samples. A gauge is kept per reporter, so that adding a
    later step of a rank replaces its value and adding another rank does not; the sum over the
    reporters is the gauge.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.data: dict[str, Any] = data or _nothing()

    def reset(self) -> None:
        """Forget everything."""
        self.data = _nothing()

    def to_dict(self) -> dict[str, Any]:
        """The plain values."""
        return self.data

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KvNixlStats:
        """Add another rank's or a later step's statistics to these; returns these."""
        try:
            self._add(other.data)
        except Exception:
            self.count("telemetry_errors_total")
            _log_once("KvNixlStats.aggregate")
        return self

    def _add(self, data: Mapping[str, Any]) -> None:
        for name, counts in data["counters"].items():
            for label, increase in counts.items():
                self.count(name, label, increase)
        for name, series in data["samples"].items():
            for label, values in series.items():
                self.observe(name, label, values)
        for reporter, gauges in data["gauges"].items():
            self.data["gauges"][reporter] = dict(gauges)

    def count(self, name: str, label: str = "", increase: float = 1) -> None:
        """Add to a counter."""
        if increase:
            counts = self.data["counters"].setdefault(name, {})
            # NumPy's numbers do not pass through msgpack.
            counts[label] = counts.get(label, 0) + int(increase)

    def observe(self, name: str, label: str, values: Sequence[float]) -> None:
        """Add to a histogram."""
        if not values:
            return
        kept = self.data["samples"].setdefault(name, {}).setdefault(label, [])
        room = MAX_SAMPLES - len(kept)
        kept.extend(map(float, values[:room]))
        self.count("telemetry_dropped_total", "", max(0, len(values) - room))

    def counter(self, name: str, label: str = "") -> float:
        """The increase of a counter."""
        value: float = self.data["counters"].get(name, {}).get(label, 0)
        return value

    def samples(self, name: str, label: str = "") -> list[float]:
        """What a histogram observed."""
        values: list[float] = self.data["samples"].get(name, {}).get(label, [])
        return values

    def gauge(self, name: str) -> float:
        """A gauge, summed over the ranks that reported."""
        value: float = sum(values.get(name, 0) for values in self.data["gauges"].values())
        return value

    def reduce(self) -> dict[str, int | float]:
        """A few numbers for vLLM's log line."""
        try:
            return self._reduce()
        except Exception:
            _log_once("KvNixlStats.reduce")
            return {}

    def _reduce(self) -> dict[str, int | float]:
        line: dict[str, int | float] = {}
        for result in METRICS["reads_total"].values:
            if result != "empty":
                line[f"Reads {result}"] = self.counter("reads_total", result)
        for cause, count in sorted(self.data["counters"].get("read_failures_total", {}).items()):
            line[f"Failed by {cause}"] = count
        line["MiB read"] = round(self.counter("read_bytes_total") / 2**20, 3)
        for words, name in (
            ("read time (ms)", "read_seconds"),
            ("transfer time (ms)", "transfer_seconds"),
            ("post time (ms)", "transfer_post_seconds"),
        ):
            if values := self.samples(name):
                line[f"Avg {words}"] = round(float(np.mean(values)) * 1e3, 3)
                line[f"P90 {words}"] = round(float(np.percentile(values, 90)) * 1e3, 3)
        if descs := self.samples("read_descriptors"):
            line["Avg descriptors"] = round(float(np.mean(descs)), 1)
        if before := self.counter("descriptors_before_merging_total"):
            after = self.counter("descriptors_after_merging_total")
            line["Descriptors left by merging (%)"] = round(100 * after / before, 1)
        line["Handshakes failed"] = self.counter("handshakes_total", "failed")
        line["Notifications failed"] = sum(
            self.data["counters"].get("notification_failures_total", {}).values()
        )
        for outcome in METRICS["leases_ended_total"].values:
            line[f"Leases {outcome}"] = self.counter("leases_ended_total", outcome)
        line["Leases renewed"] = self.counter("lease_renewals_total")
        line["Leases held"] = self.gauge("leases_held")
        line["Quarantined cells"] = self.gauge("quarantined_cells")
        line["Quarantined handles"] = self.gauge("quarantined_handles")
        line["Ranks"] = self.gauge("ranks")
        return line


class StatsCollector:
    """Collects what one worker rank, or the scheduler, counts between two steps of vLLM.

    In every step::

        for outcome in reader.step():
            stats.record_outcome(outcome)
        stats.update_reader(reader.counters, in_progress=len(reader), overdue=len(overdue))
        stats.update_producer(producer.counters, held=len(producer))
        stats.update_quarantine(cells=..., handles=agent.quarantined)
        ...
        return stats.take()  # KVConnectorBase_V1.get_kv_connector_stats

    Nothing here raises.

    Args:
        reporter: names this rank or scheduler; must differ between all of them, also between
            data-parallel engines: engine id and rank, say.
        is_rank: whether it is a worker rank, counted by the gauge ``ranks``; false for a scheduler.
        clock: seconds, monotonic.

    Attributes:
        errors: exceptions while recording; also the metric ``telemetry_errors``.
    """

    GAUGE_INTERVAL_S: Final = 1.0
    """Gauges that are not 0 are told at least so often while steps are made, changed or not: each
    log line begins with nothing known."""

    def __init__(
        self,
        reporter: str,
        *,
        is_rank: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.errors = 0
        self._reporter = reporter
        self._is_rank = is_rank
        self._clock = clock
        self._stats = KvNixlStats()
        self._seen: dict[tuple[str, str], float] = {}
        self._gauges: dict[str, float] = {}
        self._told_gauges: dict[str, float] = {}
        self._told_at = clock()
        self._told_errors = 0

    # --- consumer ---

    @_never_raises
    def record_outcome(
        self,
        outcome: ReadOutcome,
        *,
        num_descs_before: int | None = None,
        transfers: Sequence[Telemetry | None] = (),
    ) -> None:
        """Count the end of a read. Exactly once per outcome of ``Reader.step``.

        Args:
            outcome: the outcome.
            num_descs_before: descriptors before merging, if known.
            transfers: what ``Transfer.telemetry()`` said of the request's transfers.
        """
        stats = self._stats
        if outcome.stage is Stage.ABORTED:
            stats.count("reads_total", "aborted")
            return
        if not outcome.done:
            rejected = outcome.cause is FailureCause.LEASE_ENDED
            stats.count("reads_total", "rejected" if rejected else "failed")
            if outcome.cause is not None:
                stats.count("read_failures_total", _CAUSES[outcome.cause])
            return
        if not outcome.num_bytes:
            stats.count("reads_total", "empty")
            return
        stats.count("reads_total", "verified" if outcome.verified else "unverified")
        stats.count("read_bytes_total", "", outcome.num_bytes)
        stats.observe("read_size_bytes", "", [outcome.num_bytes])
        stats.observe("read_descriptors", "", [outcome.num_descs])
        stats.observe("read_seconds", "", [sum(outcome.seconds.values())])
        for stage, label in _STAGES.items():
            if stage in outcome.seconds:
                stats.observe("read_stage_seconds", label, [outcome.seconds[stage]])
        if num_descs_before is not None:
            stats.count("descriptors_before_merging_total", "", num_descs_before)
            stats.count("descriptors_after_merging_total", "", outcome.num_descs)
        figures = [each for each in transfers if each is not None]
        stats.observe("transfer_seconds", "", [each.xfer_us / 1e6 for each in figures])
        stats.observe("transfer_post_seconds", "", [each.post_us / 1e6 for each in figures])

    @_never_raises
    def update_reader(
        self, counters: ReaderCounters, *, in_progress: int = 0, overdue: int = 0
    ) -> None:
        """Take over what ``Reader.counters`` says and `record_outcome` does not.

        Args:
            counters: the reader's counters, which only grow.
            in_progress: requests without an outcome.
            overdue: those of them that are in ``Reader.overdue``.
        """
        self._gauges["reads_in_progress"] = int(in_progress)
        self._gauges["reads_overdue"] = int(overdue)
        for field, (name, label) in _READER.items():
            self._advance(name, label, getattr(counters, field))
        self._advance(
            "remotes_retired_total", "error", counters.remotes_retired - counters.remotes_evicted
        )

    @_never_raises
    def update_handshakes(self, outcomes: Mapping[str, int]) -> None:
        """Take over ``HandshakeClient.outcomes``: how often ``"done"`` or an error's class."""
        failures = dict.fromkeys(METRICS["handshake_failures_total"].values, 0)
        for name, count in outcomes.items():
            if name != "done":
                failures[_HANDSHAKE_CAUSES.get(name, "other")] += count
        for cause, count in failures.items():
            self._advance("handshake_failures_total", cause, count)
        self._advance("handshakes_total", "done", outcomes.get("done", 0))
        self._advance("handshakes_total", "failed", sum(failures.values()))

    @_never_raises
    def update_quarantine(self, cells: int, handles: int) -> None:
        """Tell what is in quarantine now.

        Args:
            cells: ``LeaseVerifier.quarantined_cells``.
            handles: ``Agent.quarantined``.
        """
        self._gauges["quarantined_cells"] = int(cells)
        self._gauges["quarantined_handles"] = int(handles)

    # --- producer ---

    @_never_raises
    def update_producer(self, counters: ProducerCounters, held: int) -> None:
        """Take over ``Producer.counters``, which only grow, and how many requests are held now."""
        self._gauges["leases_held"] = int(held)
        for field, (name, label) in _PRODUCER.items():
            self._advance(name, label, getattr(counters, field))

    # --- scheduler ---

    @_never_raises
    def record_lease(self, granted: bool) -> None:
        """Count a finished prefill, and whether it got a lease slot."""
        self._stats.count("lease_grants_total", "granted" if granted else "no_slot")

    @_never_raises
    def record_decision(self, decision: PullDecision) -> None:
        """Count what becomes of a request whose prefill ran elsewhere.

        Args:
            decision: ``"pull"``; ``"local_hit"``: the local prefix cache holds everything;
                ``"below_threshold"``: so little is missing that it is computed here;
                ``"already_read"``: another request with the same reference has read it;
                ``"window_edge"``: a sliding window of its last token begins with the end of a
                block, which its producer does not keep, so that it is computed here;
                ``"other_prompt"``: the blocks are another prompt's, so it is computed here;
                ``"not_taken"``: vLLM did not take the offer, and computes it here;
                ``"given_up"``: it ended before it was scheduled;
                ``"refused"``: its parameters cannot be used.
        """
        self._stats.count("pull_decisions_total", decision)

    # ---

    def take(self) -> KvNixlStats | None:
        """What changed since the last call; ``None`` if there is nothing to tell."""
        taken: KvNixlStats | None = self._take()
        return taken

    @_never_raises
    def _take(self) -> KvNixlStats | None:
        stats, gauges = self._stats, self._gauges
        stats.count("telemetry_errors_total", "", self.errors - self._told_errors)
        self._told_errors = self.errors
        now = self._clock()
        changed = any(value != self._told_gauges.get(name, 0) for name, value in gauges.items())
        again = now - self._told_at >= self.GAUGE_INTERVAL_S and any(gauges.values())
        if stats.is_empty() and not changed and not again:
            return None
        # Always together with the other numbers, which have to be divided by the number of ranks.
        if self._is_rank or gauges:
            stats.data["gauges"][self._reporter] = {"ranks": int(self._is_rank), **gauges}
        self._told_gauges = dict(gauges)
        self._told_at = now
        self._stats = KvNixlStats()
        return stats

    def _advance(self, name: str, label: str, value: float) -> None:
        """Count by how much a number has grown. A smaller one is a new count from 0."""
        seen = self._seen.get((name, label), 0)
        if value != seen:
            self._seen[name, label] = value
            self._stats.count(name, label, value - seen if value > seen else value)


class KvNixlPromMetrics(KVConnectorPromMetrics):
    """The metrics in Prometheus, made by ``KVConnectorBase_V1.build_prom_metrics``.

    Every series is there from the start, with 0. Names are `PREFIX` plus the name in `METRICS`;
    labels are vLLM's own and at most one of the metric.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # (engine, metric, label value) -> what is counted there
        self._series: dict[tuple[int, str, str], Any] = {}
        # Each step tells the gauges of some reporters only.
        self._gauges: dict[int, _Gauges] = {engine: {} for engine in per_engine_labelvalues}
        makers = {
            "counter": metric_types[Counter],
            "gauge": functools.partial(metric_types[Gauge], multiprocess_mode="mostrecent"),
            "histogram": metric_types[Histogram],
        }
        for name, metric in METRICS.items():
            labels = [*labelnames, metric.label] if metric.label else list(labelnames)
            more = {"buckets": list(metric.buckets)} if metric.buckets else {}
            family = makers[metric.kind](
                name=PREFIX + name, documentation=metric.meaning, labelnames=labels, **more
            )
            for engine, engine_values in per_engine_labelvalues.items():
                for value in metric.values:
                    series = family.labels(*engine_values, *([value] if metric.label else []))
                    self._series[engine, name, value] = series

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's `KvNixlStats.data`, summed over its ranks."""
        for record in (self._count, self._observe_samples, self._set_gauges):
            try:
                record(transfer_stats_data, engine_idx)
            except Exception:
                self._failed(record.__name__, engine_idx)

    def _failed(self, what: str, engine: int) -> None:
        _log_once(f"KvNixlPromMetrics.{what}")
        errors = self._series.get((engine, "telemetry_errors_total", ""))
        if errors is not None:
            errors.inc()

    def _count(self, data: Mapping[str, Any], engine: int) -> None:
        for name, counts in data["counters"].items():
            for label, increase in counts.items():
                self._series[engine, name, label].inc(increase)

    def _observe_samples(self, data: Mapping[str, Any], engine: int) -> None:
        for name, by_label in data["samples"].items():
            for label, values in by_label.items():
                series = self._series[engine, name, label]
                for value in values:
                    series.observe(value)

    def _set_gauges(self, data: Mapping[str, Any], engine: int) -> None:
        told = data["gauges"]
        if not told:
            return
        known = self._gauges[engine]
        known.update(told)
        for name, metric in METRICS.items():
            if metric.kind == "gauge":
                total = sum(values.get(name, 0) for values in known.values())
                self._series[engine, name, ""].set(total)
