"""Loading and unloading adapters while requests run, and the paths that are refused."""

import json
import shutil
import threading

import pytest
from adapters import write_adapter

LOAD, UNLOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"


def models(server) -> list[str]:
    return [model["id"] for model in server.http.get("/v1/models").json()["data"]]


def refused(answer, word: str) -> None:
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["error"]["message"]


def test_load_use_unload(server, tiny, expected) -> None:
    assert server.post(COMPLETIONS, prompt="x", model="new").status_code == 404
    assert server.post(LOAD, lora_name="new", lora_path="a").status_code == 200
    assert "new" in models(server)
    assert server.text("hello", model="new") == expected("hello", lora="a").text
    # The same name again is another version of it.
    answer = server.post(LOAD, lora_name="new", lora_path=str(tiny.adapters / "b"))
    assert answer.json() == {"status": "loaded", "lora_name": "new"}
    assert server.text("hello", model="new") == expected("hello", lora="b").text
    assert server.post(UNLOAD, lora_name="new").json()["status"] == "unloaded"
    assert "new" not in models(server)
    assert server.post(COMPLETIONS, prompt="x", model="new").status_code == 404
    again = server.post(UNLOAD, lora_name="new")
    assert again.status_code == 404 and again.json()["error"]["code"] == "model_not_found"
    server.wait_until_idle()


def test_unload_while_requests_run(server, expected, monkeypatch) -> None:
    """Its requests end on it, one of them with four choices; new ones are refused at once."""
    server.post(LOAD, lora_name="leaving", lora_path="a")
    step = server.engine.step
    monkeypatch.setattr(server.engine, "step", lambda: threading.Event().wait(0.02) or step())
    params = {"n": 4, "seed": 3, "temperature": 0.7, "ignore_eos": True}
    texts: dict[str, list[str]] = {}

    def run(key: str, model: str, **body) -> None:
        body = {"prompt": key, "max_tokens": 40, "temperature": 0, "model": model} | body
        choices = server.post(COMPLETIONS, **body).json()["choices"]
        texts[key] = [choice["text"] for choice in choices]

    threads = [
        threading.Thread(target=run, args=("one", "leaving")),
        threading.Thread(target=run, args=("four", "leaving"), kwargs=params),
        threading.Thread(target=run, args=("base", "tiny")),
    ]
    for thread in threads:
        thread.start()
    server.wait_until(lambda: sum(len(t.output_ids) > 5 for t in server.front.running()) >= 4)
    answers: list[int] = []
    unload = threading.Thread(
        target=lambda: answers.append(server.post(UNLOAD, lora_name="leaving").status_code)
    )
    unload.start()
    server.wait_until(lambda: "leaving" in server.engine.unloading_loras)
    assert server.post(COMPLETIONS, prompt="x", model="leaving").status_code == 404
    assert server.post(LOAD, lora_name="other", lora_path="b").status_code == 200
    assert server.text("new", 4, model="other") == expected("new", 4, lora="b").text
    for thread in [*threads, unload]:
        thread.join(30)
    assert answers == [200]
    assert texts["one"] == [expected("one", 40, lora="a").text]
    assert texts["four"] == [c.text for c in expected("four", 40, lora="a", **params).choices]
    assert texts["base"] == [expected("base", 40).text]
    server.post(UNLOAD, lora_name="other")
    server.wait_until_idle()


def test_unload_waits_for_no_later_version(server, monkeypatch) -> None:
    """Fault: it waited for the name, under which others could load and replace for ever."""
    step = server.engine.step
    monkeypatch.setattr(server.engine, "step", lambda: threading.Event().wait(0.03) or step())
    statuses: list[int] = []

    def run(path: str, **body) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: statuses.append(server.post(path, **body).status_code)
        )
        thread.start()
        return thread

    def text(length: int, num_running: int) -> threading.Thread:
        body = {"prompt": "x", "max_tokens": length, "ignore_eos": True, "model": "again"}
        thread = run(COMPLETIONS, **body)
        server.wait_until(lambda: server.front.num_requests == num_running)
        return thread

    server.post(LOAD, lora_name="again", lora_path="a")
    first = text(20, 1)
    unload = run(UNLOAD, lora_name="again")
    server.wait_until(lambda: "again" in server.engine.unloading_loras)
    server.post(LOAD, lora_name="again", lora_path="b")
    later = text(90, 2)
    server.post(LOAD, lora_name="again", lora_path="a")
    unload.join(30)
    assert server.ask(lambda: server.front.num_requests) == 1
    for thread in (first, later):
        thread.join(30)
    assert statuses == [200] * 3
    server.post(UNLOAD, lora_name="again")
    server.wait_until_idle()


@pytest.fixture(scope="module")
def traps(tiny, tmp_path_factory):
    """Good adapters outside the folder, and links inside it that lead to them."""
    outside = tmp_path_factory.mktemp("outside") / "good"
    shutil.copytree(tiny.adapters / "a", outside)
    (tiny.adapters / "linked").symlink_to(outside)
    (tiny.adapters / "linked_file").mkdir()
    shutil.copy(tiny.adapters / "a" / "adapter_config.json", tiny.adapters / "linked_file")
    (tiny.adapters / "linked_file" / "adapter_model.safetensors").symlink_to(
        outside / "adapter_model.safetensors"
    )
    (tiny.adapters / "inner").symlink_to(tiny.adapters / "a")
    (tiny.adapters / "round").symlink_to(tiny.adapters / "round")
    (tiny.adapters / "round_file").mkdir()
    config = tiny.adapters / "round_file" / "adapter_config.json"
    config.symlink_to(config)
    return outside


def test_paths_that_lead_outside_are_refused(server, tiny, traps) -> None:
    before = models(server)
    for path in (
        *("..", "../adapters/a", "a/../a", "/etc", "/", str(traps), "linked", "linked_file"),
        *("linked/adapter_config.json", "a\0", "\0", f"{tiny.adapters}/../adapters/a", "~"),
        *("x" * 5000, "round", "round_file", "", "."),
    ):
        answer = server.post(LOAD, lora_name="trap", lora_path=path)
        assert answer.status_code == 400, (path, answer.text)
    for path in ("/etc", "/no/such/folder"):
        # Nobody learns what there is outside.
        refused(server.post(LOAD, lora_name="trap", lora_path=path), "does not lie inside")
    assert models(server) == before
    # A link that stays inside is a folder like any other.
    assert server.post(LOAD, lora_name="inner", lora_path="inner").status_code == 200
    server.post(UNLOAD, lora_name="inner")


def test_what_is_no_whole_adapter_is_refused_by_name(server, tiny, expected) -> None:
    weights, config = "adapter_model.safetensors", "adapter_config.json"

    def made(name: str, **settings):
        folder = tiny.adapters / name
        write_adapter(folder, tiny.model, **settings)
        return folder

    pickled = made("pickled")
    (pickled / weights).rename(pickled / "adapter_model.bin")
    torn = made("torn")
    (torn / weights).write_bytes((torn / weights).read_bytes()[:-100])
    settings = json.loads((made("dora") / config).read_text())
    (tiny.adapters / "dora" / config).write_text(json.dumps(settings | {"use_dora": True}))
    made("wide", r=64)
    for path, word in {
        "missing": "missing",
        "pickled": "pickled weights",
        "torn": weights,
        "dora": "dora",
        "wide": "max_lora_rank",
    }.items():
        refused(server.post(LOAD, lora_name="x", lora_path=path), word)
    for body, word in (
        ({"lora_path": "a"}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "", "lora_path": "a"}, "called"),
        ({"lora_name": "base", "lora_path": "a"}, "base"),
        ({"lora_name": "tiny", "lora_path": "a"}, "tiny"),
        ({"lora_name": 5, "lora_path": "a"}, "lora_name"),
        ({"lora_name": "x", "lora_path": ["a"]}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a", "rank": 8}, "rank"),
    ):
        refused(server.post(LOAD, **body), word)
    refused(server.post(UNLOAD, lora_name=["a"]), "lora_name")
    assert server.text("hello") == expected("hello").text
    server.wait_until_idle()


def test_without_a_folder_there_is_no_loading(start, tiny) -> None:
    server = start(engine={"lora": {"a": str(tiny.adapters / "a")}})
    for path in (LOAD, UNLOAD):
        answer = server.post(path, lora_name="a", lora_path=str(tiny.adapters / "a"))
        assert answer.status_code == 404
        assert "--lora-root" in answer.json()["error"]["message"]
    assert models(server) == ["tiny", "a"]


def test_an_adapter_of_the_draft_model_comes_along(start, tiny, expected) -> None:
    """The target as its own draft: with the same adapter every draft is right, without it few."""
    a = str(tiny.adapters / "a")
    served = start(
        tiny.model,
        engine={"lora": {"a": a}, "draft_lora": {"a": a}, "max_loras": 4},
        lora_root=tiny.adapters,
    )
    accepted = {}
    for name, of_draft in (("both", "b"), ("alone", None)):
        answer = served.post(LOAD, lora_name=name, lora_path="b", draft_lora_path=of_draft)
        assert answer.status_code == 200, answer.text
        asked = {"prompt": "hello", "model": name, "max_tokens": 30, "temperature": 0}
        whole = served.post(COMPLETIONS, ignore_eos=True, **asked).json()
        assert whole["choices"][0]["text"] == expected("hello", 30, "b", ignore_eos=True).text
        accepted[name] = whole["usage"]["accepted"] / whole["usage"]["drafted"]
    assert accepted["both"] == 1.0 > accepted["alone"]
    outside = served.post(LOAD, lora_name="x", lora_path="b", draft_lora_path="../b")
    refused(outside, "draft_lora_path")
    assert outside.json()["error"]["param"] == "draft_lora_path"
    assert "x" not in models(served)


def test_a_draft_adapter_is_refused_where_none_was_expected(server) -> None:
    answer = server.post(LOAD, lora_name="x", lora_path="a", draft_lora_path="a")
    refused(answer, "--draft-lora")
    assert answer.json()["error"]["param"] == "draft_lora_path"
    assert "x" not in models(server)
