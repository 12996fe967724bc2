"""A run's figures in Prometheus' text format; needs prometheus-client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bevctl.errors import BevctlError, ExitCode
from bevctl.finding import Severity
from bevctl.monitor.report import Report

try:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from prometheus_client.core import GaugeMetricFamily, Metric
except ImportError as missing:
    raise BevctlError(
        "/metrics needs the package prometheus-client.", "pip install 'bevctl[serve]'", ExitCode.UNKNOWN
    ) from missing

CONTENT_TYPE = CONTENT_TYPE_LATEST
STATES = ("running", "stalled", "finished", "died", "ended")


def exposition(reports: Sequence[Report]) -> str:
    """The text that a Prometheus server reads."""
    registry = CollectorRegistry()
    registry.register(_Figures(reports))
    text: bytes = generate_latest(registry)
    return text.decode()


class _Figures:
    """What prometheus-client asks for families of gauges."""

    def __init__(self, reports: Sequence[Report]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        last = GaugeMetricFamily("bevctl_metric", "Last value of a metric in the log", labels=["run", "metric"])
        state = GaugeMetricFamily("bevctl_state", "1 for the state that the run is in", labels=["run", "state"])
        alarms = GaugeMetricFamily("bevctl_alarms", "Alarms that stand", labels=["run", "severity"])
        alarm = GaugeMetricFamily("bevctl_alarm", "1 for each alarm that stands", labels=["run", "id", "severity"])
        progress = GaugeMetricFamily("bevctl_progress", "epoch, iter, eta_s", labels=["run", "what"])
        gpus = GaugeMetricFamily("bevctl_gpu", "GPUs of this machine as NVML tells", labels=["gpu", "what"])
        for report in self._reports:
            run = str(report.log.path)
            for name, metric in report.log.metrics.items():
                last.add_metric([run, name], metric.last)
            for name in STATES:
                state.add_metric([run, name], float(report.state.name == name))
            for severity in Severity:
                alarms.add_metric([run, severity.value], sum(a.severity is severity for a in report.alarms))
            for labels in sorted({(a.id, a.severity.value) for a in report.alarms}):
                alarm.add_metric([run, *labels], 1.0)
            for name in ("epoch", "iter", "total_iters", "eta_s", "iter_time_s", "data_time_s"):
                value = getattr(report.progress, name)
                if value is not None:
                    progress.add_metric([run, name], value)
        for gpu in self._reports[0].view.gpus:
            for name in ("utilization", "memory_used_gib", "memory_total_gib", "power_w", "temperature_c"):
                value = getattr(gpu, name)
                if value is not None:
                    gpus.add_metric([str(gpu.index), name], value)
        yield from (last, state, alarms, alarm, progress, gpus)
