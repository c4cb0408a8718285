"""Real engines when reads go wrong: the answer is a single engine's, or an error for that one request; nothing is lost.

Faults are first proved to have happened, then the service is judged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.conftest import BLOCK, LEASE, House, Reference, live_bytes, make_prompt, same_answer, stats_delta
from tests.engines import Engine, engine_args, engines, hand_over, prefill
from tests.models import tiny_gemma3

SETTINGS = {"lease_seconds": LEASE, "claim_timeout": 3.0}
FAULTY = {**SETTINGS, "faults": "refuse:0", "part_runs": 2, "read_timeout": 1.0, "max_attempts": 3}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """Engines whose reads follow a schedule that a test sets, and one with room for little more than one request.

    p_verified, d_verified publish and compare digests. d_faulty recomputes, d_strict fails, what cannot be loaded.
    d_small: 44 blocks, of which a prompt of 100 tokens takes 22.
    """
    model = tiny_gemma3()

    def args(settings: dict[str, Any], policy: str = "recompute", **changes: Any) -> dict[str, Any]:
        made = engine_args(model, "hma", block_size=BLOCK, **changes)
        made["kv_transfer_config"] |= {"kv_connector_extra_config": settings, "kv_load_failure_policy": policy}
        return made

    small = {"max_model_len": 256, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 44}
    specs = {
        "p_verified": args({**SETTINGS, "verify_pages": True}),
        "d_verified": args({**FAULTY, "verify_pages": True}),
        "d_faulty": args(FAULTY, enable_prefix_caching=True),
        "d_strict": args(FAULTY, policy="fail"),
        "d_small": args(SETTINGS, max_num_seqs=2, **small),
    }
    with engines(specs, tmp_path_factory.mktemp("faulty")) as started:
        yield started


def counted(engine: Engine, before: dict[str, Any], name: str) -> dict[str, int]:
    """How often each label of a counter has come up since `before`."""
    old, new = before["stats"].get(name, {}), engine.status()["stats"].get(name, {})
    return {label: new[label] - old.get(label, 0) for label in new if new[label] != old.get(label, 0)}


@pytest.mark.parametrize(
    ("faults", "kind"),
    [("fail:1,limit:2", "failed"), ("refuse:1,limit:2", "refused"), ("hang:1,limit:1", "timeout")],
)
def test_a_failed_part_is_read_again_and_the_answer_is_the_references(
    house: House, faulty: dict[str, Engine], reference: Reference, faults: str, kind: str
) -> None:
    p, d = house["p_plain"], faulty["d_faulty"]
    prompt = make_prompt(300, seed=hash_of(faults))
    d.call("faults", text=faults)
    before = d.status()
    _, got = hand_over(p, d, {f"again-{kind}": prompt})
    assert sum(counted(d, before, "faults_injected").values()) >= 1, "no fault has happened"
    assert same_answer(got[f"again-{kind}"], reference([prompt])[0])
    moved = stats_delta(d, before)
    assert counted(d, before, "part_failures")[kind] >= 1
    assert moved["bytes_moved"] == moved["bytes_planned"] == live_bytes(d, 300)
    assert 0 < moved["rows_again"] < moved["descriptors_planned"]
    assert counted(d, before, "fallbacks") == {}
    p.wait_free()


def hash_of(text: str) -> int:
    return sum(text.encode())


@pytest.mark.parametrize("warm_blocks", [0, 5])
def test_a_load_that_fails_half_way_is_recomputed_while_others_go_on(
    house: House, faulty: dict[str, Engine], reference: Reference, warm_blocks: int
) -> None:
    """W8 and C3: the other parts have arrived; with a cold cache and with half of the prompt cached."""
    p, d = house["p_plain"], faulty["d_faulty"]
    prompt = make_prompt(300, seed=600 + warm_blocks)
    others = {f"other-{warm_blocks}-{n}": make_prompt(80 + n, seed=601) for n in range(4)}
    if warm_blocks:
        d.generate([{"id": f"warm-{warm_blocks}", "tokens": prompt[: warm_blocks * BLOCK + 1]}])
    first = prefill(p, {f"p-half-{warm_blocks}": prompt})
    d.call("faults", text="fail:0.8,seed:2")
    before = d.status()
    requests: list[dict[str, Any]] = [
        {"id": name, "tokens": tokens, "params": {"max_tokens": 24}} for name, tokens in others.items()
    ]
    name = f"half-{warm_blocks}"
    requests.append({"id": name, "tokens": prompt, "transfer": first[f"p-{name}"]["transfer"]})
    got = d.generate(requests)
    assert counted(d, before, "faults_injected")["fail"] >= 3, "no fault has happened"
    assert counted(d, before, "fallbacks") == {"transfer|recomputed": 1}
    assert same_answer(got[name], reference([prompt])[0])
    wanted = house["reference"].generate(
        [{"id": f"w-{n}", "tokens": tokens, "params": {"max_tokens": 24}} for n, tokens in others.items()]
    )
    assert all(same_answer(got[n], wanted[f"w-{n}"]) for n in others)
    d.call("faults", text="")
    _, good = hand_over(p, d, {f"after-{warm_blocks}": make_prompt(200, seed=602)})
    assert same_answer(good[f"after-{warm_blocks}"], reference([make_prompt(200, seed=602)])[0])
    p.wait_free()


def test_blocks_are_not_given_up_while_a_sibling_still_reads(
    house: House, faulty: dict[str, Engine], reference: Reference
) -> None:
    """W4: one part fails for good, others end late; until then the request holds its blocks, and no other is hurt."""
    p, d = house["p_plain"], faulty["d_strict"]
    prompt, other = make_prompt(300, seed=610), make_prompt(310, seed=611)
    first = prefill(p, {"p-w4": prompt})
    d.call("faults", text="fail:0.5,late:0.5:0.9,seed:4")
    before = d.status()
    d.call("add", requests=[{"id": "w4", "tokens": prompt, "transfer": first["p-w4"]["transfer"]}])
    deadline = time.monotonic() + 20
    while counted(d, before, "faults_injected").get("fail", 0) < 3 and time.monotonic() < deadline:
        d.call("step", count=1)
    held = d.status()
    assert counted(d, before, "faults_injected").keys() == {"fail", "late"}, "no fault has happened"
    assert (held["requests"], held["blocks_in_use"] > 0) == (1, True)
    beside = d.generate([{"id": "beside", "tokens": other}])
    result = d.call("run", ids=["w4"])
    assert same_answer(beside["beside"], reference([other])[0])
    assert result["w4"]["reason"] == "error"
    assert counted(d, before, "fallbacks") == {"transfer|failed": 1}
    d.wait_free()
    p.wait_free()


def test_a_corrupted_page_is_found_by_its_digest_and_read_again(
    faulty: dict[str, Engine], reference: Reference
) -> None:
    p, d = faulty["p_verified"], faulty["d_verified"]
    prompt = make_prompt(300, seed=620)
    d.call("faults", text="corrupt:1,limit:3")
    before = d.status()
    _, got = hand_over(p, d, {"corrupt": prompt})
    moved = stats_delta(d, before)
    assert counted(d, before, "faults_injected") == {"corrupt": 3}
    assert counted(d, before, "part_failures")["digest"] >= 1
    assert same_answer(got["corrupt"], reference([prompt])[0])
    assert 0 < moved["bytes_again"] < moved["bytes_moved"] == live_bytes(d, 300)
    p.wait_free()


def test_pages_that_stay_wrong_are_recomputed(faulty: dict[str, Engine], reference: Reference) -> None:
    p, d = faulty["p_verified"], faulty["d_verified"]
    prompt = make_prompt(200, seed=621)
    d.call("faults", text="corrupt:1")
    before = d.status()
    _, got = hand_over(p, d, {"stays": prompt})
    assert counted(d, before, "fallbacks") == {"digest|recomputed": 1}
    assert same_answer(got["stays"], reference([prompt])[0])
    d.call("faults", text="")
    p.wait_free()


def test_verified_pairs_answer_as_the_reference(faulty: dict[str, Engine], reference: Reference) -> None:
    p, d = faulty["p_verified"], faulty["d_verified"]
    d.call("faults", text="")
    prompts = {f"v{n}": make_prompt(n, seed=622) for n in (2, 33, 95, 127, 223, 300)}
    before = d.status()
    _, got = hand_over(p, d, prompts)
    wanted = dict(zip(prompts, reference(list(prompts.values())), strict=True))
    assert [name for name in prompts if not same_answer(got[name], wanted[name])] == []
    assert stats_delta(d, before)["transfers"] == len(prompts)
    assert counted(d, before, "part_failures") == {}


def test_a_side_without_digests_is_refused_by_name(
    house: House, faulty: dict[str, Engine], reference: Reference
) -> None:
    d = faulty["d_verified"]
    prompt = make_prompt(120, seed=623)
    before = d.status()
    _, got = hand_over(house["p_plain"], d, {"unverified": prompt})
    assert same_answer(got["unverified"], reference([prompt])[0])
    assert counted(d, before, "fallbacks") == {"incompatible|recomputed": 1}
    assert "verify_pages" in d.log.read_text()


def test_a_handle_is_worth_nothing_once_p_has_reused_the_blocks(house: House, reference: Reference) -> None:
    """W2."""
    p, d = house["p_plain"], house["d_plain"]
    prompt = make_prompt(150, seed=630)
    first, got = hand_over(p, d, {"once": prompt})
    assert same_answer(got["once"], reference([prompt])[0])
    p.generate([{"id": f"reuse-{n}", "tokens": make_prompt(100 + n, seed=631)} for n in range(30)])
    before, p_before = d.status(), p.status()
    result = d.generate([{"id": "twice", "tokens": prompt, "transfer": first["p-once"]["transfer"]}])
    assert same_answer(result["twice"], reference([prompt])[0])
    assert stats_delta(d, before).get("bytes_moved", 0) == 0
    assert counted(d, before, "fallbacks") == {"consumed|recomputed": 1}
    assert counted(p, p_before, "claims_refused") == {"consumed": 1}


def test_two_requests_that_fill_the_cache_with_received_kv_both_end(house: House, faulty: dict[str, Engine]) -> None:
    """H1: each needs one more block than is left while the other holds its own."""
    p, d = house["p_plain"], faulty["d_small"]
    prompts = {f"h1-{n}": make_prompt(100, seed=640 + n) for n in range(2)}
    _, got = hand_over(p, d, prompts, params={"max_tokens": 40})
    wanted = house["reference"].generate(
        [{"id": f"w-{n}", "tokens": tokens, "params": {"max_tokens": 40}} for n, tokens in prompts.items()]
    )
    assert [name for name in prompts if not same_answer(got[name], wanted[f"w-{name}"])] == []
    d.wait_free()
    p.wait_free()


def test_many_prompts_through_a_small_decode_engine_all_end(house: House, faulty: dict[str, Engine]) -> None:
    """H2 and H7: preemptions on D, prompts that wait longer than their first lease, nothing loaded twice."""
    p, d = house["p_plain"], faulty["d_small"]
    prompts = {f"h7-{n}": make_prompt(60 + 3 * n, seed=650) for n in range(16)}
    before = d.status()
    _, got = hand_over(p, d, prompts, params={"max_tokens": 48})
    wanted = house["reference"].generate(
        [{"id": f"w-{n}", "tokens": tokens, "params": {"max_tokens": 48}} for n, tokens in prompts.items()]
    )
    assert [name for name in prompts if not same_answer(got[name], wanted[f"w-{name}"])] == []
    moved = stats_delta(d, before)
    fallbacks = sum(counted(d, before, "fallbacks").values())
    assert moved["transfers"] + fallbacks == len(prompts)
    d.wait_free()
    p.wait_free()


def test_completions_of_requests_that_are_gone_are_ignored(faulty: dict[str, Engine], reference: Reference) -> None:
    """C7."""
    d = faulty["d_faulty"]
    assert d.call("stray", ids=["gone", "never-was"]) == []
    assert d.call("stray", ids=["gone"]) == []
    prompt = make_prompt(90, seed=660)
    got = d.generate([{"id": "after-stray", "tokens": prompt}])
    assert same_answer(got["after-stray"], reference([prompt])[0])


@pytest.mark.parametrize("broken", ["empty group", "null in a live position", "not computed"])
def test_no_offer_is_made_of_a_request_that_lacks_live_blocks(house: House, broken: str) -> None:
    """C8: P preempted the request in its last step."""
    p = house["p_plain"]
    tables = [[1, 2, 3] for _ in p.call("groups")]
    if broken == "empty group":
        tables[2] = []
    elif broken == "null in a live position":
        tables[-1] = [1, 0, 3]
    computed = 50 if broken == "not computed" else 90
    before = p.status()
    assert p.call("finish", tables=tables, computed=computed, prompt=90) == [False, None]
    assert p.status()["requests"] == before["requests"]


def test_request_ids_of_any_shape_never_cross(house: House, reference: Reference) -> None:
    """H6."""
    p, d = house["p_plain"], house["d_plain"]
    names = ["a/b", "../..", "a-0-b", "-", "\u00fc\u4e16\U0001f600", "x" * 4000, "a|b", " spaced "]
    prompts = {name: make_prompt(70 + 11 * index, seed=670) for index, name in enumerate(names)}
    before = d.status()
    _, got = hand_over(p, d, prompts)
    wanted = dict(zip(prompts, reference(list(prompts.values())), strict=True))
    assert [name[:20] for name in prompts if not same_answer(got[name], wanted[name])] == []
    assert stats_delta(d, before)["transfers"] == len(names)
    d.wait_free()
    p.wait_free()
