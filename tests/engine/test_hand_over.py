"""Prompts through real pairs over real NIXL: the answer is the single engine's, the bytes are the live pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.conftest import (
    BLOCK,
    WINDOW,
    House,
    Reference,
    live_bytes,
    make_prompt,
    same_answer,
    stats_delta,
)
from tests.engines import Engine, hand_over, prefill

PAIRS = [("p_plain", "d_plain"), ("p_cached", "d_plain"), ("p_plain", "d_cached"), ("p_cached", "d_cached")]

# Around blocks (k·B - 1, k·B, k·B + 1), around the window, and W - 1 + k·B, where a connector that lets D recompute the
# last prompt token reads a null block.
EDGES = sorted(
    {2, 3}
    | {k * BLOCK + shift for k in range(1, 7) for shift in (-1, 0, 1)}
    | {WINDOW - 1, WINDOW, WINDOW + 1, WINDOW - BLOCK, WINDOW + BLOCK}
    | {WINDOW - 1 + k * BLOCK for k in range(1, 7)}
    | {300, 511, 512, 513}
)


@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_every_edge_length_is_the_reference_and_moves_exactly_the_live_pages(
    house: House, reference: Reference, p: str, d: str
) -> None:
    prompts = {str(n): make_prompt(n, seed=PAIRS.index((p, d))) for n in EDGES}
    wanted = dict(zip(prompts, reference(list(prompts.values())), strict=True))
    wrong, misfits = [], []
    for name, tokens in prompts.items():
        before = house[d].status()
        _, got = hand_over(house[p], house[d], {name: tokens})
        if not same_answer(got[name], wanted[name]):
            wrong.append(name)
        moved = stats_delta(house[d], before)
        expected = live_bytes(house[d], len(tokens))
        if not (moved["bytes_moved"] == moved["bytes_planned"] == expected) or moved["transfers"] != 1:
            misfits.append((name, moved["bytes_moved"], moved["bytes_planned"], expected))
        if moved["descriptors_posted"] != moved["runs_planned"]:
            misfits.append((name, moved["descriptors_posted"], moved["runs_planned"]))
    assert wrong == []
    assert misfits == []
    for engine in (house[p], house[d]):
        engine.wait_free()


@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_sixteen_at_once(house: House, reference: Reference, p: str, d: str) -> None:
    lengths = [5, 31, 40, 64, 95, 96, 127, 150, 191, 200, 223, 255, 300, 400, 512, 640]
    prompts = {f"c{n}": make_prompt(n, seed=100 + PAIRS.index((p, d))) for n in lengths}
    wanted = dict(zip(prompts, reference(list(prompts.values())), strict=True))
    before = house[d].status()
    _, got = hand_over(house[p], house[d], prompts)
    assert [name for name in prompts if not same_answer(got[name], wanted[name])] == []
    moved = stats_delta(house[d], before)
    expected = sum(live_bytes(house[d], n) for n in lengths)
    assert moved["bytes_moved"] == moved["bytes_planned"] == expected
    assert moved["transfers"] == 16
    assert moved["descriptors_posted"] == moved["runs_planned"]
    # Sixteen requests that come and go leave pools in which blocks neither all merge nor all lie alone.
    assert 16 * 2 < moved["runs_planned"] < moved["descriptors_planned"]
    assert "fallbacks" not in moved or moved["fallbacks"] == before["stats"].get("fallbacks", {})
    for engine in (house[p], house[d]):
        engine.wait_free()


def test_one_token_needs_no_transfer(house: House, reference: Reference) -> None:
    prompt = make_prompt(1)
    before = house["d_plain"].status()
    first, got = hand_over(house["p_plain"], house["d_plain"], {"one": prompt})
    assert first["p-one"]["transfer"] is None
    assert same_answer(got["one"], reference([prompt])[0])
    assert stats_delta(house["d_plain"], before).get("transfers", 0) == 0


@pytest.mark.parametrize("cached_blocks", [1, 2, 3, 5])
def test_what_d_has_cached_does_not_move(house: House, reference: Reference, cached_blocks: int) -> None:
    p, d = house["p_plain"], house["d_cached"]
    prompt = make_prompt(7 * BLOCK + 5, seed=200 + cached_blocks)
    d.generate([{"id": "warm", "tokens": prompt[: cached_blocks * BLOCK + 1]}])
    before = d.status()
    _, got = hand_over(p, d, {"w": prompt})
    assert same_answer(got["w"], reference([prompt])[0])
    moved = stats_delta(d, before)
    assert moved["bytes_moved"] == moved["bytes_planned"] == live_bytes(d, len(prompt), cached_blocks)


def test_a_prompt_that_d_has_cached_whole_moves_nothing_and_is_released(house: House, reference: Reference) -> None:
    p, d = house["p_plain"], house["d_cached"]
    prompt = make_prompt(4 * BLOCK + 1, seed=300)
    d.generate([{"id": "warm", "tokens": prompt}])
    before = d.status()
    _, got = hand_over(p, d, {"w": prompt})
    assert same_answer(got["w"], reference([prompt])[0])
    assert stats_delta(d, before).get("bytes_moved", 0) == 0
    p.wait_free()


def test_requests_without_a_handle_are_those_of_an_engine_without_a_connector(
    house: House, reference: Reference
) -> None:
    prompts = [make_prompt(n, seed=400) for n in (1, 33, 96, 200)]
    for name in ("p_plain", "p_cached", "d_plain", "d_cached"):
        results = house[name].generate([{"id": f"plain-{i}", "tokens": p} for i, p in enumerate(prompts)])
        wanted = reference(prompts)
        assert all(same_answer(results[f"plain-{i}"], wanted[i]) for i in range(len(prompts))), name


def _fallbacks(engine: Engine) -> dict[str, int]:
    return dict(engine.status()["stats"].get("fallbacks", {}))


EDITS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another request": lambda t: {**t, "remote_request_id": "no-such-request"},
    "another engine": lambda t: {**t, "remote_engine_id": "elsewhere@" + t["remote_engine_id"].split("@")[1]},
    "another life": lambda t: {**t, "remote_engine_id": t["remote_engine_id"].split("@")[0] + "@" + "0" * 32},
    "foreign engine id": lambda t: {**t, "remote_engine_id": "no-epoch"},
    "closed port": lambda t: {**t, "remote_port": 1},
    "wrong type": lambda t: {**t, "remote_port": "80"},
    "foreign host": lambda t: {**t, "remote_host": "192.0.2.1"},
    "missing key": lambda t: {k: v for k, v in t.items() if k != "remote_host"},
}
REASONS = {
    "another request": "unknown",
    "another engine": "engine",
    "another life": "epoch",
    "foreign engine id": "malformed",
    "closed port": "unreachable",
    "wrong type": "malformed",
    "foreign host": "not_allowed",
    "missing key": "malformed",
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_handle_is_recomputed_and_counted(house: House, reference: Reference, edit: str) -> None:
    p, d = house["p_plain"], house["d_plain"]
    prompt = make_prompt(150, seed=500)
    first = prefill(p, {"p": prompt})
    before = _fallbacks(d)
    edited = EDITS[edit](first["p"]["transfer"])
    result = d.generate([{"id": "d", "tokens": prompt, "transfer": edited}])
    assert same_answer(result["d"], reference([prompt])[0])
    key = f"{REASONS[edit]}|recomputed"
    assert _fallbacks(d).get(key, 0) == before.get(key, 0) + 1
    p.wait_free(3 * 6.0)


def test_block_ids_in_the_body_are_not_used(house: House, reference: Reference) -> None:
    p, d = house["p_plain"], house["d_plain"]
    prompt = make_prompt(150, seed=501)
    first = prefill(p, {"p": prompt})
    edited = {**first["p"]["transfer"], "remote_block_ids": [[7, 8, 9]] * 7}
    before = d.status()
    result = d.generate([{"id": "d", "tokens": prompt, "transfer": edited}])
    assert same_answer(result["d"], reference([prompt])[0])
    assert stats_delta(d, before)["bytes_moved"] == live_bytes(d, 150)


def test_a_handle_used_twice_is_read_once(house: House, reference: Reference) -> None:
    p, d = house["p_plain"], house["d_plain"]
    prompt = make_prompt(150, seed=502)
    first = prefill(p, {"p": prompt})
    before = _fallbacks(d)
    requests = [{"id": f"d{i}", "tokens": prompt, "transfer": first["p"]["transfer"]} for i in range(2)]
    result = d.generate(requests)
    assert all(same_answer(result[f"d{i}"], reference([prompt])[0]) for i in range(2))
    assert _fallbacks(d).get("consumed|recomputed", 0) == before.get("consumed|recomputed", 0) + 1
    p.wait_free()


def test_one_handle_for_a_list_of_prompts_serves_each_from_its_own_offer(house: House, reference: Reference) -> None:
    p, d = house["p_plain"], house["d_plain"]
    prompts = [make_prompt(n, seed=503) for n in (140, 150, 160)]
    first = prefill(p, {f"cmpl-list-{i}": tokens for i, tokens in enumerate(prompts)})
    handle = first["cmpl-list-0"]["transfer"]  # a router passes one on
    before = d.status()
    result = d.generate([{"id": f"list-{i}", "tokens": t, "transfer": handle} for i, t in enumerate(prompts)])
    wanted = reference(prompts)
    assert all(same_answer(result[f"list-{i}"], wanted[i]) for i in range(3))
    moved = stats_delta(d, before)
    assert moved["bytes_moved"] == sum(live_bytes(d, len(t)) for t in prompts)
    p.wait_free()


def test_an_offer_that_nobody_claims_is_freed_after_one_lease(house: House) -> None:
    p = house["p_plain"]
    before = p.status()
    prefill(p, {"p": make_prompt(150)})
    assert p.status()["blocks_in_use"] > 0
    p.wait_free(2 * 6.0)
    assert stats_delta(p, before)["leases_expired"] == 1


def test_an_expired_handle_is_recomputed(house: House, reference: Reference) -> None:
    p, d = house["p_plain"], house["d_plain"]
    prompt = make_prompt(150, seed=504)
    first = prefill(p, {"p": prompt})
    p.wait_free(2 * 6.0)
    before = _fallbacks(d)
    result = d.generate([{"id": "d", "tokens": prompt, "transfer": first["p"]["transfer"]}])
    assert same_answer(result["d"], reference([prompt])[0])
    assert _fallbacks(d).get("expired|recomputed", 0) == before.get("expired|recomputed", 0) + 1


def test_a_client_that_leaves_before_its_load_releases_both_sides(house: House) -> None:
    p, d = house["p_plain"], house["d_plain"]
    prompt = make_prompt(400, seed=505)
    first = prefill(p, {"p": prompt})
    d.call("add", requests=[{"id": "d", "tokens": prompt, "transfer": first["p"]["transfer"]}])
    d.call("abort", ids=["d"])
    d.wait_free()
    p.wait_free(2 * 6.0)


def test_prompt_logprobs_are_computed_on_d(house: House, reference: Reference) -> None:
    p, d = house["p_plain"], house["d_plain"]
    prompt = make_prompt(150, seed=506)
    before = d.status()
    _, got = hand_over(p, d, {"x": prompt}, params={"prompt_logprobs": 1})
    assert same_answer(got["x"], reference([prompt])[0])
    assert stats_delta(d, before).get("transfers", 0) == 0
    p.wait_free(4.0)  # given back at once, before its lease of 6 s ends


def test_with_policy_fail_a_refused_request_fails_alone(house: House, reference: Reference) -> None:
    p, d = house["p_plain"], house["d_failing"]
    good, bad = make_prompt(150, seed=507), make_prompt(170, seed=508)
    first = prefill(p, {"good": good, "bad": bad})
    handle = first["bad"]["transfer"]
    result = d.generate(
        [
            {"id": "good", "tokens": good, "transfer": first["good"]["transfer"]},
            {"id": "bad", "tokens": bad, "transfer": {**handle, "remote_request_id": "no-such-request"}},
        ]
    )
    assert same_answer(result["good"], reference([good])[0])
    assert result["bad"]["tokens"] == []
    assert result["bad"]["reason"] == "error"
    assert _fallbacks(d) == {"unknown|failed": 1}
    # The engine goes on, and the offer that was not read can still be.
    again = d.generate([{"id": "again", "tokens": bad, "transfer": handle}])
    assert same_answer(again["again"], reference([bad])[0])
    d.wait_free()
    p.wait_free()
