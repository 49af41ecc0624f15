"""The replicas' metrics as one text, each sample with the label ``replica``, and the front's."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from specdec.replicas.fleet import Fleet, State


class FrontMetrics:
    """What the front itself counts."""

    def __init__(self, fleet: Fleet | None = None) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "HTTP requests answered", "route", "status")
        self.retried = self._counter(
            "retried", "Requests that another replica was asked for, and why", "reason"
        )
        if fleet is not None:
            self.registry.register(_FleetCollector(fleet))

    def retry(self, why: str) -> None:
        self.retried.labels(why).inc()

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"specdec_front_{name}", help_text, labels, registry=self.registry)


class _FleetCollector:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            "specdec_front_replica_state", "1 for the state it is in", labels=["replica", "state"]
        )
        restarts = GaugeMetricFamily(
            "specdec_front_replica_restarts", "Starts after the first", labels=["replica"]
        )
        texts = GaugeMetricFamily(
            "specdec_front_replica_texts",
            "Texts sent there that have not ended",
            labels=["replica"],
        )
        for replica in self._fleet.replicas:
            number = str(replica.number)
            for state in State:
                states.add_metric([number, str(state)], float(replica.state is state))
            restarts.add_metric([number], replica.num_restarts)
            texts.add_metric([number], replica.num_texts)
        yield from (states, restarts, texts)


def merged(front: CollectorRegistry, texts: Mapping[str, str]) -> bytes:
    """``texts``: the answer of /metrics of each replica that gave one."""
    text: bytes = generate_latest(front)
    return text + generate_latest(_Labelled(texts))


class _Labelled:
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for given in text_string_to_metric_families(text):
                family = families.setdefault(
                    given.name, Metric(given.name, given.documentation, given.type)
                )
                for sample in given.samples:
                    labels = {**sample.labels, "replica": replica}
                    family.samples.append(sample._replace(labels=labels))
        return families.values()
