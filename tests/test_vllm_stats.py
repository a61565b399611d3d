"""What the connector counts: each outcome once, through vLLM's own classes to Prometheus text."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import pickle
import re
import warnings
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from kvnixl.agent import Telemetry
from kvnixl.outcomes import FailureCause, ReaderCounters, ReadOutcome, Stage
from kvnixl.producer import ProducerCounters

if TYPE_CHECKING:
    import prometheus_client

    from kvnixl.vllm import stats as stats_module
    from kvnixl.vllm.stats import (
        METRICS,
        PREFIX,
        KvNixlPromMetrics,
        KvNixlStats,
        StatsCollector,
        cause_label,
    )

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here"),
]

DOCUMENT = Path(__file__).parents[1] / "docs" / "vllm-metrics.md"
SECONDS = {Stage.HANDSHAKE: 0.5, Stage.QUEUED: 0.002, Stage.READING: 0.03, Stage.VERIFYING: 0.004}


@pytest.fixture(scope="module", autouse=True)
def vllm_classes() -> None:
    """Import vLLM when the first of these tests runs: it takes seconds, and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import prometheus_client

        from kvnixl.vllm import stats
    names = {name: getattr(stats, name) for name in [*stats.__all__, "PREFIX"]}
    globals().update(names, stats_module=stats, prometheus_client=prometheus_client)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Prometheus:
    """vLLM's front end: a registry of its own, and what it shows."""

    def __init__(self, engines: int = 1) -> None:
        registry = self.registry = prometheus_client.CollectorRegistry()

        def in_registry(kind: Any) -> Callable[..., Any]:
            return lambda **arguments: kind(registry=registry, **arguments)

        kinds = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
        self.metrics = KvNixlPromMetrics(
            SimpleNamespace(kv_transfer_config=None),
            {kind: in_registry(kind) for kind in kinds},
            ["model_name", "engine"],
            {engine: ["tiny", str(engine)] for engine in range(engines)},
        )

    def observe(self, stats: KvNixlStats | None, engine: int = 0) -> None:
        assert stats is not None
        # As it arrives: plain values that went through msgpack.
        self.metrics.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(stats.data)), engine)

    def shown(self, engine: int = 0) -> dict[str, float]:
        """What the text format says but zeros: ``name`` or ``name{label="value"}`` -> value."""
        text = prometheus_client.generate_latest(self.registry).decode()
        shown: dict[str, float] = {}
        for name, labels, value in re.findall(r"^(vllm:\S+?)\{(.*?)\} (\S+)$", text, re.MULTILINE):
            if name.endswith(("_created", "_bucket")):
                continue
            pairs = dict(re.findall(r'(\w+)="(.*?)"', labels))
            assert pairs.pop("model_name") == "tiny"
            if pairs.pop("engine") == str(engine) and float(value):
                more = "".join(f'{{{label}="{text}"}}' for label, text in pairs.items())
                shown[name.removeprefix(PREFIX) + more] = float(value)
        return shown


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def collector(clock: Clock) -> StatsCollector:
    return StatsCollector("engine-0/0", clock=clock)


@pytest.fixture(autouse=True)
def nothing_logged_yet() -> Iterator[None]:
    stats_module._logged.clear()
    yield
    stats_module._logged.clear()


def done(**changes: Any) -> ReadOutcome:
    values: dict[str, Any] = {
        "req_id": "r",
        "stage": Stage.DONE,
        "verified": True,
        "ended_in": Stage.VERIFYING,
        "num_bytes": 1 << 20,
        "num_descs": 8,
        "seconds": SECONDS,
    }
    return ReadOutcome(**values | changes)


def failed(cause: FailureCause) -> ReadOutcome:
    return ReadOutcome("r", Stage.FAILED, cause=cause, reason="because", num_bytes=5, num_descs=6)


def shown_after(collector: StatsCollector, *, engine: int = 0) -> dict[str, float]:
    prometheus = Prometheus()
    prometheus.observe(collector.take(), engine)
    shown = prometheus.shown(engine)
    assert shown.pop("ranks") == 1
    return shown


# --- one test for each counter: drive it once, scrape, compare everything ------------------------


def of_done_read(result: str) -> dict[str, float]:
    return {
        f'reads_total{{result="{result}"}}': 1,
        "read_bytes_total": 1 << 20,
        "read_size_bytes_count": 1,
        "read_size_bytes_sum": 1 << 20,
        "read_descriptors_count": 1,
        "read_descriptors_sum": 8,
        "read_seconds_count": 1,
        "read_seconds_sum": pytest.approx(0.536),
    } | {
        f'read_stage_seconds_{kind}{{stage="{stage.name.lower()}"}}': value
        for stage, seconds in SECONDS.items()
        for kind, value in (("count", 1), ("sum", seconds))
    }


@pytest.mark.parametrize(("verified", "result"), [(True, "verified"), (False, "unverified")])
def test_a_read_that_is_done(collector: StatsCollector, verified: bool, result: str) -> None:
    collector.record_outcome(done(verified=verified))
    assert shown_after(collector) == of_done_read(result)


def test_a_read_of_nothing_is_not_counted_as_verified(collector: StatsCollector) -> None:
    collector.record_outcome(done(num_bytes=0, num_descs=0))
    assert shown_after(collector) == {'reads_total{result="empty"}': 1}


def test_an_aborted_read(collector: StatsCollector) -> None:
    collector.record_outcome(ReadOutcome("r", Stage.ABORTED, num_bytes=5))
    assert shown_after(collector) == {'reads_total{result="aborted"}': 1}


@pytest.mark.parametrize("cause", FailureCause)
def test_each_cause_of_failure(collector: StatsCollector, cause: FailureCause) -> None:
    collector.record_outcome(failed(cause))
    result = "rejected" if cause is FailureCause.LEASE_ENDED else "failed"
    assert shown_after(collector) == {
        f'reads_total{{result="{result}"}}': 1,
        f'read_failures_total{{cause="{cause_label(cause)}"}}': 1,
    }


def test_causes_have_different_labels() -> None:
    labels = [cause_label(cause) for cause in FailureCause]
    assert len(set(labels)) == len(labels)
    assert cause_label(FailureCause.LEASE_ENDED) == "verification"


def test_figures_of_nixl(collector: StatsCollector) -> None:
    transfers = [Telemetry(4, 1 << 19, 50.0, 2000.0), Telemetry(4, 1 << 19, 70.0, 4000.0)]
    collector.record_outcome(done(), num_descs_before=512, transfers=transfers)
    shown = shown_after(collector)
    assert shown == of_done_read("verified") | {
        "descriptors_before_merging_total": 512,
        "descriptors_after_merging_total": 8,
        "transfer_seconds_count": 2,
        "transfer_seconds_sum": pytest.approx(0.006),
        "transfer_post_seconds_count": 2,
        "transfer_post_seconds_sum": pytest.approx(0.00012),
    }


PRODUCER_SERIES = {
    "held": "leases_total",
    "read": 'leases_ended_total{outcome="read"}',
    "released": 'leases_ended_total{outcome="released"}',
    "expired": 'leases_ended_total{outcome="expired"}',
    "aborted": 'leases_ended_total{outcome="aborted"}',
    "completions": "completions_total",
    "failed_completions": "completions_failed_total",
    "early_completions": "completions_early_total",
    "duplicate_completions": 'completions_ignored_total{cause="duplicate"}',
    "late_completions": 'completions_ignored_total{cause="late"}',
    "unknown_completions": 'completions_ignored_total{cause="unknown"}',
    "dropped_completions": 'completions_ignored_total{cause="dropped"}',
    "refused_completions": 'completions_ignored_total{cause="refused"}',
    "heartbeats": "lease_renewals_total",
    "unknown_heartbeats": 'notifications_ignored_total{cause="unknown_renewal"}',
    "malformed": 'notifications_ignored_total{cause="malformed"}',
    "push_registrations": 'notifications_ignored_total{cause="push_registration"}',
    "drain_errors": 'producer_errors_total{cause="drain"}',
    "internal_errors": 'producer_errors_total{cause="internal"}',
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ProducerCounters)])
def test_each_counter_of_the_producer(collector: StatsCollector, field: str) -> None:
    collector.update_producer(ProducerCounters(**{field: 1}), held=0)
    assert shown_after(collector) == {PRODUCER_SERIES[field]: 1}
    assert collector.errors == 0


READER_SERIES = {
    "notifications": "notifications_total",
    "notifications_failed": 'notification_failures_total{cause="not_sent"}',
    "notifications_inexpressible": 'notification_failures_total{cause="inexpressible"}',
    "remotes_met": 'remotes_total{result="met"}',
    "remotes_not_met": 'remotes_total{result="not_met"}',
    "remotes_retired": 'remotes_retired_total{cause="error"}',
}
# What record_outcome counts: a reader counts it as well.
BY_OUTCOME = {"verified", "unverified", "failed", "aborted", "bytes_read", "descs_posted"}


@pytest.mark.parametrize("field", READER_SERIES)
def test_each_counter_of_the_reader(collector: StatsCollector, field: str) -> None:
    collector.update_reader(ReaderCounters(**{field: 1}))
    assert shown_after(collector) == {READER_SERIES[field]: 1}


def test_idle_remotes_are_not_counted_as_failed_ones(collector: StatsCollector) -> None:
    collector.update_reader(ReaderCounters(remotes_retired=3, remotes_evicted=2))
    assert shown_after(collector) == {
        'remotes_retired_total{cause="error"}': 1,
        'remotes_retired_total{cause="idle"}': 2,
    }


def test_no_counter_of_the_reader_is_left_out() -> None:
    fields = {field.name for field in dataclasses.fields(ReaderCounters)}
    assert fields == {*READER_SERIES, "remotes_evicted", *BY_OUTCOME}


def test_what_outcomes_count_is_not_counted_again(collector: StatsCollector) -> None:
    counters = ReaderCounters(verified=1, unverified=1, aborted=1, bytes_read=9, descs_posted=9)
    counters.failed[FailureCause.TIMEOUT] = 1
    collector.update_reader(counters)
    assert collector.take() is None


HANDSHAKES = {
    "CompatibilityError": "mismatch",
    "EngineIdMismatchError": "engine_id",
    "IncarnationChangedError": "restarted",
    "HandshakeRefusedError": "refused",
    "HandshakeReplyError": "malformed",
    "HandshakeTimeoutError": "timeout",
    "HandshakeConnectError": "connect",
    "HostResolutionError": "host",
    "RemoteNotAllowedError": "not_allowed",
    "SomeNewError": "other",
}


@pytest.mark.parametrize(("error", "cause"), HANDSHAKES.items())
def test_each_way_a_handshake_fails(collector: StatsCollector, error: str, cause: str) -> None:
    collector.update_handshakes(Counts({"done": 5, error: 1}))
    assert shown_after(collector) == {
        'handshakes_total{result="done"}': 5,
        'handshakes_total{result="failed"}': 1,
        f'handshake_failures_total{{cause="{cause}"}}': 1,
    }


def test_every_error_of_a_handshake_is_known() -> None:
    from kvnixl import errors

    classes = errors.HandshakeError.__subclasses__()
    assert {cls.__name__ for cls in classes} == set(HANDSHAKES) - {"SomeNewError"}


@pytest.mark.parametrize("granted", [True, False])
def test_lease_grants(collector: StatsCollector, granted: bool) -> None:
    collector.record_lease(granted)
    result = "granted" if granted else "no_slot"
    assert shown_after(collector) == {f'lease_grants_total{{result="{result}"}}': 1}


@pytest.mark.parametrize(
    "decision",
    ["pull", "local_hit", "below_threshold", "already_read", "window_edge", "refused"],
)
def test_each_decision_of_the_scheduler(collector: StatsCollector, decision: Any) -> None:
    collector.record_decision(decision)
    assert shown_after(collector) == {f'pull_decisions_total{{decision="{decision}"}}': 1}


def test_gauges(collector: StatsCollector) -> None:
    collector.update_producer(ProducerCounters(), held=1)
    collector.update_reader(ReaderCounters(), in_progress=2, overdue=3)
    collector.update_quarantine(cells=4, handles=5)
    assert shown_after(collector) == {
        "leases_held": 1,
        "reads_in_progress": 2,
        "reads_overdue": 3,
        "quarantined_cells": 4,
        "quarantined_handles": 5,
    }


# --- deltas, ranks and steps --------------------------------------------------------------------


def test_an_idle_step_has_nothing_to_tell(collector: StatsCollector, clock: Clock) -> None:
    for _ in range(3):
        collector.update_producer(ProducerCounters(), held=0)
        collector.update_reader(ReaderCounters())
        collector.update_quarantine(0, 0)
        collector.update_handshakes({})
        assert collector.take() is None
        clock.now += 60


def test_counters_are_told_as_increases(collector: StatsCollector) -> None:
    prometheus = Prometheus()
    for held in (1, 1, 4):
        collector.update_producer(ProducerCounters(held=held), held=0)
        taken = collector.take()
        if taken is not None:
            prometheus.observe(taken)
    assert prometheus.shown() == {"leases_total": 4, "ranks": 1}


def test_counters_of_a_new_object_begin_at_zero_again(collector: StatsCollector) -> None:
    collector.update_producer(ProducerCounters(held=5), held=0)
    collector.update_producer(ProducerCounters(held=2), held=0)
    assert shown_after(collector) == {"leases_total": 7}


def test_gauges_are_told_when_they_change_and_again_after_a_second(
    collector: StatsCollector, clock: Clock
) -> None:
    def told() -> dict[str, float] | None:
        stats = collector.take()
        return None if stats is None else stats.data["gauges"]["engine-0/0"]

    collector.update_producer(ProducerCounters(), held=3)
    assert told() == {"ranks": 1, "leases_held": 3}
    clock.now += 0.5
    assert told() is None
    clock.now += 0.5
    assert told() == {"ranks": 1, "leases_held": 3}
    collector.update_producer(ProducerCounters(), held=0)
    assert told() == {"ranks": 1, "leases_held": 0}
    clock.now += 60
    assert told() is None


def ranks_of_a_step(held: list[int | None], verified: int, clock: Clock) -> list[KvNixlStats]:
    """What ranks tell; ``None``: that rank has nothing to tell."""
    step = []
    for rank, number in enumerate(held):
        if number is None:
            continue
        collector = StatsCollector(f"engine-0/{rank}", clock=clock)
        for _ in range(verified):
            collector.record_outcome(done())
        collector.update_producer(ProducerCounters(held=1), held=number)
        taken = collector.take()
        assert taken is not None
        step.append(taken)
    return step


def aggregated(parts: list[KvNixlStats]) -> KvNixlStats:
    total = parts[0]
    for part in parts[1:]:
        # vLLM sends each by pickle from its worker.
        result = total.aggregate(pickle.loads(pickle.dumps(part)))
        assert result is total
    return total


def test_ranks_add_up_and_steps_replace_gauges(clock: Clock) -> None:
    prometheus, log = Prometheus(), KvNixlStats()
    # Held by two ranks: 4 and 4, then 3 and 4 (the second has nothing to tell), then 3 and 0.
    for held in ([4, 4], [3, None], [None, 0]):
        total = aggregated(ranks_of_a_step(held, 1, clock))
        prometheus.observe(total)
        log.aggregate(KvNixlStats(copy.deepcopy(total.data)))
    shown = prometheus.shown()
    assert shown["leases_held"] == 3
    assert shown["ranks"] == 2
    assert shown["leases_total"] == 4
    assert shown['reads_total{result="verified"}'] == 4
    assert shown["read_seconds_count"] == 4
    line = log.reduce()
    assert (line["Leases held"], line["Ranks"], line["Reads verified"]) == (3, 2, 4)


def test_adding_does_not_change_or_share_what_was_added(clock: Clock) -> None:
    first, second = ranks_of_a_step([1, 2], 1, clock)
    before = copy.deepcopy(second.data)
    total = KvNixlStats().aggregate(second)
    total.aggregate(first)
    total.aggregate(first)
    assert second.data == before


def test_a_scheduler_is_no_rank(collector: StatsCollector, clock: Clock) -> None:
    scheduler = StatsCollector("engine-0/scheduler", is_rank=False, clock=clock)
    scheduler.record_decision("pull")
    scheduler.update_quarantine(cells=2, handles=0)
    collector.record_outcome(done())
    parts = [collector.take(), scheduler.take()]
    prometheus = Prometheus()
    prometheus.observe(aggregated([part for part in parts if part is not None]))
    shown = prometheus.shown()
    assert (shown["ranks"], shown["quarantined_cells"]) == (1, 2)


def test_engines_are_told_apart(collector: StatsCollector) -> None:
    prometheus = Prometheus(engines=2)
    collector.record_outcome(failed(FailureCause.TIMEOUT))
    prometheus.observe(collector.take(), 1)
    assert prometheus.shown(0) == {}
    assert prometheus.shown(1)['read_failures_total{cause="timeout"}'] == 1


def test_data_is_plain_also_when_numpy_numbers_came_in(collector: StatsCollector) -> None:
    collector.record_outcome(
        done(num_bytes=np.int64(7), num_descs=np.int32(3), seconds={Stage.READING: np.float64(1)}),
        num_descs_before=np.int64(9),  # type: ignore[arg-type]
    )
    collector.update_quarantine(np.int64(1), np.int64(2))  # type: ignore[arg-type]
    taken = collector.take()
    assert taken is not None
    assert json.loads(json.dumps(taken.to_dict())) == taken.data
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(taken.data)) == taken.data
    assert pickle.loads(pickle.dumps(taken)).data == taken.data
    assert collector.errors == 0


def test_stats_that_nobody_takes_stay_small(
    collector: StatsCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_module, "MAX_SAMPLES", 10)
    for _ in range(15):
        collector.record_outcome(done(seconds={}))
    shown = shown_after(collector)
    assert shown["read_seconds_count"] == 10
    assert shown["telemetry_dropped_total"] == 15  # 5 of each of 3 histograms
    assert shown['reads_total{result="verified"}'] == 15


# --- the log line -------------------------------------------------------------------------------


def test_the_log_line(collector: StatsCollector) -> None:
    transfers = [Telemetry(8, 1 << 20, 50.0, 2000.0)]
    collector.record_outcome(done(), num_descs_before=16, transfers=transfers)
    collector.record_outcome(done(verified=False, num_bytes=3 << 20, num_descs=24))
    collector.record_outcome(failed(FailureCause.LEASE_ENDED))
    collector.record_outcome(failed(FailureCause.TIMEOUT))
    collector.record_outcome(failed(FailureCause.TIMEOUT))
    collector.update_producer(ProducerCounters(held=6, expired=2, read=1, heartbeats=9), held=3)
    collector.update_quarantine(1, 2)
    taken = collector.take()
    assert taken is not None
    line = taken.reduce()
    assert line == {
        "Reads verified": 1,
        "Reads unverified": 1,
        "Reads rejected": 1,
        "Reads failed": 2,
        "Reads aborted": 0,
        "Failed by timeout": 2,
        "Failed by verification": 1,
        "MiB read": 4.0,
        "Avg read time (ms)": 536.0,
        "P90 read time (ms)": 536.0,
        "Avg transfer time (ms)": 2.0,
        "P90 transfer time (ms)": 2.0,
        "Avg post time (ms)": 0.05,
        "P90 post time (ms)": 0.05,
        "Avg descriptors": 16.0,
        "Descriptors left by merging (%)": 50.0,
        "Handshakes failed": 0,
        "Notifications failed": 0,
        "Leases read": 1,
        "Leases released": 0,
        "Leases expired": 2,
        "Leases aborted": 0,
        "Leases renewed": 9,
        "Leases held": 3,
        "Quarantined cells": 1,
        "Quarantined handles": 2,
        "Ranks": 1,
    }


def test_the_log_line_of_failures_only(collector: StatsCollector) -> None:
    collector.record_outcome(failed(FailureCause.HANDSHAKE))
    taken = collector.take()
    assert taken is not None
    assert not taken.is_empty()
    assert taken.reduce()["Failed by handshake"] == 1


def test_empty_stats(collector: StatsCollector) -> None:
    assert KvNixlStats().is_empty()
    collector.record_outcome(done())
    taken = collector.take()
    assert taken is not None
    taken.reset()
    assert taken.is_empty()
    assert set(taken.reduce().values()) <= {0}


def test_vllm_logs_and_resets(collector: StatsCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import metrics

    connector = SimpleNamespace(build_kv_connector_stats=KvNixlStats)
    monkeypatch.setattr(
        metrics.KVConnectorFactory, "get_connector_class", staticmethod(lambda config: connector)
    )
    line = metrics.KVConnectorLogging(SimpleNamespace(kv_connector="KvNixlConnector"))
    lines: list[str] = []
    for _ in range(2):
        collector.record_outcome(done())
        taken = collector.take()
        assert taken is not None
        line.observe(taken.data)
    line.log(lambda text, *args: lines.append(text % args))
    line.log(lambda text, *args: lines.append(text % args))
    assert len(lines) == 1
    assert "Reads verified=2, " in lines[0]


# --- telemetry never decides --------------------------------------------------------------------


class Broken:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_what_recording_raises_is_counted_and_logged_once(
    collector: StatsCollector, caplog: pytest.LogCaptureFixture
) -> None:
    broken: Any = Broken()
    with caplog.at_level(logging.WARNING, "kvnixl.vllm.stats"):
        for _ in range(2):
            collector.record_outcome(broken)
            collector.update_reader(broken)
            collector.update_producer(broken, 0)
            collector.update_handshakes(broken)
            collector.update_quarantine(broken, broken)
    assert collector.errors == 10
    assert len(caplog.records) == 5
    assert shown_after(collector) == {"telemetry_errors_total": 10}
    assert collector.take() is None


def test_missing_telemetry_of_nixl_costs_only_its_histograms(collector: StatsCollector) -> None:
    collector.record_outcome(done(), transfers=[None])
    assert shown_after(collector) == of_done_read("verified")
    assert collector.errors == 0


def test_a_taking_that_fails_is_survived(clock: Clock) -> None:
    collector = StatsCollector("r", clock=clock)
    collector.record_outcome(done())
    collector._clock = lambda: 1 / 0
    assert collector.take() is None
    collector._clock = clock
    assert shown_after(collector) == of_done_read("verified") | {"telemetry_errors_total": 1}


@pytest.mark.parametrize("data", [{"x": 1}, {"counters": 3}, None, {"counters": {"new": {"": 1}}}])
def test_data_of_another_version_is_survived(collector: StatsCollector, data: Any) -> None:
    prometheus = Prometheus()
    prometheus.metrics.observe(data)
    prometheus.metrics.observe(data, 7)
    assert prometheus.shown()["telemetry_errors_total"] >= 1
    collector.record_outcome(done())
    prometheus.observe(collector.take())
    assert prometheus.shown()['reads_total{result="verified"}'] == 1
    assert KvNixlStats(data).reduce() is not None
    total = KvNixlStats()
    total.aggregate(SimpleNamespace(data=data))


# --- names and documentation --------------------------------------------------------------------


def test_names_follow_the_rules_of_prometheus() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert (metric.kind == "histogram") == bool(metric.buckets), name
        if metric.kind == "histogram":
            assert name.endswith(("_seconds", "_bytes", "_descriptors")), name
            assert list(metric.buckets) == sorted(set(metric.buckets)), name
        assert (metric.label != "") == (metric.values != ("",)), name


def test_buckets_fit_loopback_and_a_fleet() -> None:
    for name, metric in METRICS.items():
        if name.endswith("_seconds"):
            assert metric.buckets[0] <= 100e-6
            assert metric.buckets[-1] >= 60
        if name.endswith("_bytes") and metric.kind == "histogram":
            assert metric.buckets[0] <= 8192
            assert metric.buckets[-1] >= 32 << 30


def test_every_series_is_there_from_the_start() -> None:
    registry = Prometheus().registry
    for name, metric in METRICS.items():
        suffix = "_count" if metric.kind == "histogram" else ""
        for value in metric.values:
            labels = {"model_name": "tiny", "engine": "0"}
            if metric.label:
                labels[metric.label] = value
            assert registry.get_sample_value(PREFIX + name + suffix, labels) == 0, (name, value)


def test_the_page_explains_what_is_registered() -> None:
    registry = Prometheus().registry
    registered = set()
    for family in registry.collect():
        total = "_total" if family.type == "counter" else ""
        registered.add(family.name + total)
    rows = re.findall(r"^\| `(vllm:\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(registered)


def test_the_page_names_every_value_of_every_label() -> None:
    text = DOCUMENT.read_text()
    tables = {
        name: set(re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE))
        for name, rows in re.findall(
            r"^`(\w+)` by .*?\n\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE
        )
    }
    for name, metric in METRICS.items():
        row = re.search(rf"^\| `{PREFIX}{name}` \|.*$", text, re.MULTILINE)
        assert row is not None, name
        if metric.label:
            assert f"`{metric.label}`" in row[0], name
            named = tables.pop(name, None) or set(re.findall(r"`(\w+)`", row[0]))
            assert set(metric.values) <= named, name
    assert not tables


@pytest.mark.parametrize("name", ["reads_total", "read_failures_total", "handshake_failures_total"])
def test_the_tables_of_the_page_have_no_other_values(name: str) -> None:
    rows = DOCUMENT.read_text().partition(f"\n`{name}` by ")[2].partition("\n\n")[2]
    named = re.findall(r"^\| `(\w+)` \|", rows.partition("\n\n")[0], re.MULTILINE)
    assert sorted(named) == sorted(METRICS[name].values)
