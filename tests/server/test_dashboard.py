"""The dashboard's files and the state that it shows."""

from __future__ import annotations

import re

import msgspec
import pytest
from conftest import Start
from server_fakes import LiveServer

from pippin import __version__
from pippin.errors import EngineError
from pippin.types.message import StageInfo

SCRIPTS = ("api", "app", "chat", "format", "metrics", "sparkline")
TYPES = {
    "/": "text/html; charset=utf-8",
    "/dashboard/style.css": "text/css; charset=utf-8",
    "/dashboard/icon.svg": "image/svg+xml",
    **{f"/dashboard/{name}.js": "text/javascript; charset=utf-8" for name in SCRIPTS},
}


@pytest.mark.parametrize(("path", "content_type"), TYPES.items())
def test_files(server: LiveServer, path: str, content_type: str) -> None:
    answer = server.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == content_type
    assert answer.headers["x-content-type-options"] == "nosniff"
    head = server.client.head(path)
    assert head.status_code == 200
    assert head.content == b""
    for name in ("content-type", "content-length", "content-security-policy"):
        assert head.headers[name] == answer.headers[name]


def test_the_policy_allows_nothing_from_elsewhere(server: LiveServer) -> None:
    policy = server.client.get("/").headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in policy


@pytest.mark.parametrize("path", TYPES)
def test_files_refer_only_to_each_other(server: LiveServer, path: str) -> None:
    text = server.client.get(path).text.replace("http://www.w3.org/2000/svg", "")
    assert "//" not in re.sub(r"(^|\s)//\s", "", text)  # comments aside, no address
    for reference in re.findall(r"(?:src|href)=\"(?!#)([^\"]+)\"", text):
        assert f"/{reference}" in TYPES
    for reference in re.findall(r"from \"\./([^\"]+)\"", text):
        assert f"/dashboard/{reference}" in TYPES


def test_no_script_or_style_in_the_page(server: LiveServer) -> None:
    page = server.client.get("/").text
    assert re.findall(r"<script[^>]*>([^<]*)</script>", page) == [""]
    assert not re.search(r"<style|\sstyle=|\son\w+=", page)


@pytest.mark.parametrize(
    "path", ["/dashboard", "/dashboard/", "/dashboard/__init__.py", "/dashboard/../app.py"]
)
def test_nothing_else_is_served(server: LiveServer, path: str) -> None:
    assert server.client.get(path).status_code == 404


def test_the_page_cannot_be_written(server: LiveServer) -> None:
    answer = server.client.post("/", content=b"x")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD, OPTIONS"


# -- state


def test_cluster_of_one_machine(server: LiveServer) -> None:
    state = server.client.get("/api/cluster").json()
    assert state["version"] == __version__
    [node] = state["nodes"]
    assert {"name", "host", "state", "reason", "backend", "device", "memory_bytes", "power_watts"} \
        <= set(node)  # fmt: skip
    assert (node["state"], node["backend"], node["device"]) == ("up", "fake", "cpu")
    assert node["memory_bytes"] > 0
    assert node["power_watts"] is None
    assert state["links"] == []
    assert state["plan"] is None
    [replica] = state["replicas"]
    assert replica["state"] == "up"
    assert replica["node"] == node["name"]
    assert replica["pid"] == server.engine.ready.pid
    [stage] = replica["stages"]
    assert set(stage) == {"node", "rank", "pid", "layers", "backend", "busy_ratio"}
    assert stage["pid"] == replica["pid"]
    model = state["model"]
    assert (model["name"], model["architecture"]) == ("fake", "FakeForCausalLM")
    assert (model["kv_tokens"], model["max_model_len"]) == (1600, 512)
    assert model["backend_reason"] == "a test"


def test_the_stages_of_a_pipeline(server: LiveServer) -> None:
    engine = server.engine
    before = engine.ready
    stages = tuple(
        StageInfo(rank=rank, node=f"n{rank}", pid=10 + rank, layers=layers, backend="fake",
                  device="cpu", weights_bytes=1)
        for rank, layers in enumerate(((0, 17), (17, 30)))
    )  # fmt: skip
    engine.ready = msgspec.structs.replace(before, stages=stages)
    engine.stats = msgspec.structs.replace(engine.stats, busy=(0.25, 0.75))
    try:
        [replica] = server.client.get("/api/cluster").json()["replicas"]
        text = server.client.get("/metrics").text
    finally:
        engine.ready = before
    assert replica["stages"] == [
        {"node": "n0", "rank": 0, "pid": 10, "layers": [0, 17], "backend": "fake",
         "busy_ratio": 0.25},
        {"node": "n1", "rank": 1, "pid": 11, "layers": [17, 30], "backend": "fake",
         "busy_ratio": 0.75},
    ]  # fmt: skip
    for rank, ratio in ((0, 0.25), (1, 0.75)):
        line = f'pippin_stage_busy_ratio{{engine="0",model_name="fake",rank="{rank}"}} {ratio}'
        assert line in text


def test_a_failed_engine_shows(server: LiveServer) -> None:
    server.engine.failure = EngineError("it fell over")
    [replica] = server.client.get("/api/cluster").json()["replicas"]
    assert replica["state"] == "failed"
    assert "it fell over" in replica["reason"]


def test_draining_shows(start: Start) -> None:
    server = start()
    server.call(server.app.drain)
    [replica] = server.client.get("/api/cluster").json()["replicas"]
    assert replica["state"] == "draining"


def test_keys(start: Start) -> None:
    """The page loads without one, its data do not."""
    server = start(server={"api_key": ["sesame"]})
    for path in TYPES:
        assert server.client.get(path).status_code == 200
    assert server.client.get("/api/cluster").status_code == 401
    headers = {"Authorization": "Bearer sesame"}
    assert server.client.get("/api/cluster", headers=headers).status_code == 200
