"""/metrics and /stats: their numbers are those of the answers."""

import pytest

from specdec.outputs import StepRecord
from specdec.server.stats import as_json, mean_padding, take_snapshot
from specdec.verifier.modes import BatchDescriptor

COMPLETIONS = "/v1/completions"
COUNTED = ("prompt_tokens", "generated_tokens", "drafted_tokens", "accepted_tokens", "texts")


def counts(server, model: str) -> dict[str, float]:
    return {name: server.metric(f"specdec_{name}_total", model=model) for name in COUNTED}


def test_counters_are_the_sums_of_usage(server) -> None:
    """Over whole answers, streams, choices, several prompts, adapters, stops inside a run."""
    bodies = [
        {"prompt": "one", "max_tokens": 9},
        {"prompt": ["one", "three"], "n": 3, "seed": 1, "max_tokens": 7},
        {"prompt": "five", "stop": ["a"], "max_tokens": 30},
        {"prompt": "first token alone", "max_tokens": 1},
    ]
    names = {"tiny": "base", "a": "a"}
    before = {name: counts(server, label) for name, label in names.items()}
    ok = server.metric("specdec_requests_total", route=COMPLETIONS, status="200")
    wanted = {name: dict.fromkeys(COUNTED, 0) for name in names}
    for name in names:
        for body in bodies:
            usage = server.post(COMPLETIONS, model=name, **body).json()["usage"]
            streamed = list(
                server.openai.completions.create(
                    model=name, **body, stream=True, stream_options={"include_usage": True}
                )
            )[-1].usage.model_dump()
            for each in (usage, streamed):
                wanted[name]["prompt_tokens"] += each["prompt_tokens"]
                wanted[name]["generated_tokens"] += each["completion_tokens"]
                wanted[name]["drafted_tokens"] += each["drafted"]
                wanted[name]["accepted_tokens"] += each["accepted"]
                prompts = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
                wanted[name]["texts"] += prompts * body.get("n", 1)
    for name, label in names.items():
        now = counts(server, label)
        assert {key: now[key] - before[name][key] for key in COUNTED} == wanted[name]
        assert wanted[name]["drafted_tokens"] > wanted[name]["accepted_tokens"] > 0
    answered = server.metric("specdec_requests_total", route=COMPLETIONS, status="200")
    assert answered - ok == 2 * len(names) * len(bodies)


def test_histograms_count_texts(server) -> None:
    names = [f"specdec_{name}_seconds_count" for name in ("time_to_first_token", "text")]
    per_token = "specdec_time_per_output_token_seconds_count"
    before = [server.metric(name, model="b") for name in (*names, per_token)]
    for max_tokens in (1, 5):
        server.text("x", max_tokens, model="b", n=3)
    after = [server.metric(name, model="b") for name in (*names, per_token)]
    # A text of one token has no time between tokens.
    assert [now - then for now, then in zip(after, before, strict=True)] == [6, 6, 3]


def test_statuses_are_counted(server) -> None:
    def count(status: str) -> float:
        return server.metric("specdec_requests_total", route=COMPLETIONS, status=status)

    before = [count("400"), count("404")]
    server.post(COMPLETIONS, prompt="")
    server.post(COMPLETIONS, prompt="x", model="typo")
    assert [count("400"), count("404")] == [before[0] + 1, before[1] + 1]
    lost = server.metric("specdec_requests_total", route="other", status="404")
    server.http.get("/somewhere/else")
    assert server.metric("specdec_requests_total", route="other", status="404") == lost + 1


def test_engine_numbers_are_the_engine_s(server) -> None:
    server.text("x", 20)
    stats = server.ask(server.engine.stats)
    metric = server.metric
    for mode, steps in stats.steps_by_mode.items():
        assert metric("specdec_steps_total", mode=mode) == steps
    for name, by_mode in stats.row_steps_by_adapter.items():
        for mode, steps in by_mode.items():
            assert metric("specdec_row_steps_total", model=name, mode=mode) == steps > 0
    for position, (drafted, accepted) in enumerate(
        zip(stats.drafted_by_position, stats.accepted_by_position, strict=True), start=1
    ):
        label = {"position": str(position)}
        assert metric("specdec_drafted_tokens_by_position_total", **label) == drafted
        assert metric("specdec_accepted_tokens_by_position_total", **label) == accepted
    assert metric("specdec_drafted_tokens_total") == stats.drafted == sum(stats.drafted_by_position)
    replays = sum(row.replays for row in server.ask(server.engine.graph_table))
    assert metric("specdec_graph_replays_total") == replays > 0
    assert metric("specdec_kv_blocks_free") == stats.free_kv_blocks
    assert metric("specdec_kv_blocks") == stats.total_kv_blocks
    assert metric("specdec_adapter_loads_total") == stats.adapter_loads
    assert metric("specdec_padded_rows_total") == stats.padded_rows
    assert metric("specdec_live_rows_total") == stats.live_rows > 0


def test_stats_show_what_runs(server, monkeypatch) -> None:
    server.wait_until_idle()
    step = server.engine.step
    seen: list[dict] = []

    def look() -> None:
        step()
        seen.append(as_json(take_snapshot(server.front)))

    monkeypatch.setattr(server.engine, "step", look)
    server.text("hello", 10, n=7, ignore_eos=True)
    busiest = max(seen, key=lambda stats: stats["num_running"])
    # The engine has five rows.
    assert (busiest["num_running"], busiest["num_waiting"]) == (5, 2)
    text = busiest["texts"][0]
    assert text["model"] == "base" and text["prompt_tokens"] == 5 and text["is_running"]
    monkeypatch.undo()
    server.wait_until_idle()
    stats = server.http.get("/stats").json()
    assert stats["texts"] == [] and stats["kv_blocks"]["free"] == stats["kv_blocks"]["total"]
    assert stats["tokens_per_second"] > 0 and stats["model"] == "tiny" and stats["k"] == 3
    assert set(stats["adapters"]) >= {"a", "b"}
    used = [graph for graph in stats["graphs"] if graph["replays"]]
    # Padding is that of recent steps, which may not have met every graph.
    padding = [graph["padding"] for graph in used if graph["padding"] is not None]
    assert padding and all(0 <= share < 1 for share in padding)


def test_an_engine_that_fails_is_told(start, monkeypatch) -> None:
    server = start()
    assert server.http.get("/health").json() == {"status": "ok"}

    def broken() -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(server.engine, "step", broken)
    for stream in (True, False):
        answer = server.post(COMPLETIONS, prompt="x", stream=stream)
        assert "engine_dead" in answer.text and "planted" not in answer.text
    for path in ("/health", "/stats", "/metrics"):
        assert server.http.get(path).status_code == 503, path


def test_padding_is_the_mean_over_steps() -> None:
    shape = BatchDescriptor(16, 4, True)
    records = [StepRecord("FULL", shape, reqs, 4 * reqs, 3, None) for reqs in (1, 4, 4)]
    records.append(StepRecord("PIECEWISE", BatchDescriptor(10, 2), 2, 7, 0, None))
    padding = mean_padding(records)
    assert padding["FULL", shape] == pytest.approx(0.25)
    assert padding["PIECEWISE", BatchDescriptor(10, 0)] == pytest.approx(0.3)
