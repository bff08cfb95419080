"""/metrics: what the HTTP process sees of requests, and what the engine says of itself, in Prometheus' text format.

Invariant: names follow vLLM's and SGLang's with the prefix `truegate:`; engine gauges are read at scrape time from the
engine's last message, so that a step pays nothing for them. L MoE layers, E logical experts.
"""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from truegate.serve.client import EngineClient, Stream
from truegate.types import EngineStats, StepOutput

PREFIX = "truegate:"
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Sequences being computed.", lambda s: s.running),
    ("num_requests_waiting", "Sequences waiting to be computed.", lambda s: s.waiting),
    (
        "kv_cache_usage_perc",
        "Share of cache pages held by running sequences; 1 is full.",
        lambda s: _share(s.pages_used, s.pages_total),
    ),
    (
        "cache_hit_rate",
        "Share of prompt tokens found in the prefix cache, since start.",
        lambda s: _share(s.prefix_hit_tokens, s.prefix_query_tokens),
    ),
    ("gen_throughput", "Generated tokens per second, over the last ten seconds or so.", lambda s: s.tokens_per_second),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("prompt_tokens", "Prompt rows computed.", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.generated_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_query_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hit_tokens),
    ("num_preemptions", "Sequences put back in the queue for want of cache pages.", lambda s: s.preemptions),
    ("engine_steps", "Batches computed.", lambda s: s.steps),
)


class Metrics:
    """One server's registry; `observe` is called with every output, `render` with every scrape."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # a series beside every counter that nobody reads
        self.registry = CollectorRegistry()
        self._label = {"model_name": model_name}
        self._ttft = self._histogram("time_to_first_token_seconds", "Submission to first token.", _LONG)
        self._itl = self._histogram("inter_token_latency_seconds", "Between one token and the next.", _SHORT)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean of an answer, without its first token.", _SHORT
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Submission to an answer's end.", _LONG)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt length of a request.", _TOKENS)
        self._output = self._histogram("request_generation_tokens", "Length of an answer.", _TOKENS)
        self._ended = Counter(
            PREFIX + "request_success",
            "Answers by the reason they ended.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._http = Counter(
            PREFIX + "http_requests", "HTTP responses by path and status.", ["path", "status"], registry=self.registry
        )

    def watch(self, client: EngineClient) -> None:
        """Show this engine's own numbers too."""
        self.registry.register(_EngineCollector(client, self._label))

    def observe(self, stream: Stream, output: StepOutput, now: float) -> None:
        """Time one output of one answer."""
        if output.token_ids:
            last = stream.last_token.get(output.index)
            if last is None:
                self._ttft.observe(now - stream.submitted)
                stream.first_token[output.index] = now
            else:
                self._itl.observe((now - last) / len(output.token_ids))
            stream.last_token[output.index] = now
            stream.counts[output.index] = stream.counts.get(output.index, 0) + len(output.token_ids)
        if output.finish_reason is not None:
            self._end(stream, output, now)

    def count_response(self, path: str, status: int) -> None:
        self._http.labels(path=path, status=str(status)).inc()

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _end(self, stream: Stream, output: StepOutput, now: float) -> None:
        count = stream.counts.get(output.index, 0)
        self._ended.labels(finished_reason=output.finish_reason, **self._label).inc()
        self._e2e.observe(now - stream.submitted)
        self._output.observe(count)
        if output.index == 0:
            self._prompt.observe(len(stream.request.prompt_token_ids))
        if count > 1:
            self._tpot.observe((now - stream.first_token[output.index]) / (count - 1))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(**self._label)


class _EngineCollector:
    """Turns the engine's last message into samples when somebody scrapes."""

    def __init__(self, client: EngineClient, label: dict[str, str]) -> None:
        self._client, self._label = client, label

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("engine_up", "1 while the engine process answers.", float(self._client.state == "ready"))
        restarts = CounterMetricFamily(
            PREFIX + "engine_restarts", "Engine processes started again.", labels=["model_name"]
        )
        restarts.add_metric(list(self._label.values()), self._client.restarts)
        yield restarts
        stats = self._client.stats
        if stats is None:
            return
        for name, text, value in _GAUGES:
            yield self._gauge(name, text, value(stats))
        for name, text, value in _COUNTERS:
            yield self._counter(name, text, value(stats))
        yield from self._audit(stats)
        if stats.expert_load_LE is not None:
            yield from self._expert_load(stats.expert_load_LE)

    def _audit(self, stats: EngineStats) -> Iterator[Metric]:
        test = GaugeMetricFamily(
            PREFIX + "self_test_passed",
            "1: the routed weights measured at start are those of the model's definition; 0: a fault was planted "
            "since; absent: nothing to test.",
            labels=["model_name"],
        )
        if stats.self_test is not None:
            test.add_metric(list(self._label.values()), float(stats.fault is None))
        yield test
        fault = GaugeMetricFamily(PREFIX + "fault_planted", "1 for the fault planted by --fault.", labels=["fault"])
        if stats.fault is not None:
            fault.add_metric([stats.fault], 1.0)
        yield fault

    def _expert_load(self, load_LE: Any) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            PREFIX + "expert_tokens", "Rows each logical expert got, by MoE layer.", labels=["layer", "expert"]
        )
        balance = GaugeMetricFamily(
            PREFIX + "expert_balancedness", "Mean over maximum of a layer's expert load; 1 is even.", labels=["layer"]
        )
        for layer, load_E in enumerate(load_LE):
            for expert, rows in enumerate(load_E):
                tokens.add_metric([str(layer), str(expert)], float(rows))
            peak = float(load_E.max())
            balance.add_metric([str(layer)], float(load_E.mean()) / peak if peak else 1.0)
        yield tokens
        yield balance

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=list(self._label))
        family.add_metric(list(self._label.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=list(self._label))
        family.add_metric(list(self._label.values()), value)
        return family


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
