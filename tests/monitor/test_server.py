from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from bevctl.errors import BevctlError
from bevctl.monitor import server as server_module
from bevctl.monitor.gpus import Gpu
from bevctl.monitor.report import Report
from bevctl.monitor.server import MonitorServer, parse_address
from tests.monitor.runs import healthy, judge, make_log


@contextmanager
def serving(look: object) -> Iterator[tuple[str, int]]:
    with MonitorServer(("127.0.0.1", 0), look) as server:  # type: ignore[arg-type]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[0], int(server.server_address[1])  # type: ignore[misc]
        server.shutdown()


def get(address: tuple[str, int], path: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(*address, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers["Content-Type"], body


def look() -> Sequence[Report]:
    columns = healthy(60)
    columns["loss"][-1] = float("nan")
    return [judge(make_log(60, columns, max_iters=9000), gpus=(Gpu(0, "card", utilization=97.0),))]


def test_the_page_and_what_is_not_there() -> None:
    with serving(look) as address:
        status, kind, body = get(address, "/?again")
        assert (status, kind) == (200, "text/html; charset=utf-8")
        assert 'http-equiv="refresh"' in body
        assert get(address, "/etc/passwd")[0] == 404


def test_figures_for_prometheus() -> None:
    pytest.importorskip("prometheus_client")
    with serving(look) as address:
        status, kind, body = get(address, "/metrics")
    assert status == 200
    assert kind.startswith("text/plain")
    for line in (
        'bevctl_state{run="run.log",state="running"} 1.0',
        'bevctl_state{run="run.log",state="died"} 0.0',
        'bevctl_metric{metric="loss",run="run.log"} NaN',
        'bevctl_alarms{run="run.log",severity="warn"} 1.0',
        'bevctl_alarm{id="NAN001",run="run.log",severity="warn"} 1.0',
        'bevctl_progress{run="run.log",what="total_iters"} 9000.0',
        'bevctl_gpu{gpu="0",what="utilization"} 97.0',
    ):
        assert line in body.splitlines()


def test_requests_that_come_together_share_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def counted() -> Sequence[Report]:
        looks.append(1)
        return look()

    with serving(counted) as address:
        get(address, "/")
        get(address, "/")
        assert len(looks) == 1
        monkeypatch.setattr(server_module, "FRESH_S", -1.0)
        get(address, "/")
        assert len(looks) == 2


def test_a_log_that_went_away_is_told_and_the_server_stays() -> None:
    def gone() -> Sequence[Report]:
        raise BevctlError("run.log cannot be read.", "Look.")

    with serving(gone) as address:
        assert get(address, "/")[0] == 503
        assert get(address, "/")[2] == "run.log cannot be read. Look.\n"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":8080", ("127.0.0.1", 8080)),
        ("8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:9", ("::1", 9)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host:", "host:port", "host:70000", "host:-1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(BevctlError, match="no address"):
        parse_address(text)


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with serving(look) as address, pytest.raises(BevctlError, match=r"Cannot serve on 127\.0\.0\.1"):
        MonitorServer(address, look)
