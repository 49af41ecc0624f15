"""The status page, as a headless browser shows it."""

import shutil
import subprocess

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)


def test_the_page_needs_nothing_from_elsewhere(server) -> None:
    answer = server.http.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    for word in ("http://", "https://", "<link", "@import", "innerHTML"):
        assert word not in answer.text
    assert "default-src 'self'" in answer.headers["content-security-policy"]


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_browser_shows_the_engine_s_numbers(server, tmp_path) -> None:
    for name in ("tiny", "a"):
        server.text("hello", 30, model=name)
    # An adapter's name is shown as it is, whatever it holds.
    odd = "<img src=x onerror=alert(1)>"
    server.post("/v1/load_lora_adapter", lora_name=odd, lora_path="b")
    stats = server.http.get("/stats").json()
    assert BROWSER is not None
    # Virtual time: the page has polled twice when it is read.
    page = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *(f"--user-data-dir={tmp_path}", "--virtual-time-budget=2000", "--dump-dom"),
            server.url,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    server.post("/v1/unload_lora_adapter", lora_name=odd)
    assert ">live<" in page and "tiny on cpu, k = 3" in page
    assert "&lt;img" in page and "<img" not in page
    for position in stats["by_position"]:
        assert f"<td>{position['drafted']:,}</td><td>{position['accepted']:,}</td>" in page
    for counts in stats["by_adapter"].values():
        assert f"<td>{counts['drafted']:,}</td><td>{counts['accepted']:,}</td>" in page
    most = max(graph["replays"] for graph in stats["graphs"])
    assert f"<td>{most:,}</td>" in page and "1 + 3" in page
