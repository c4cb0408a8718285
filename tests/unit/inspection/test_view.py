"""What is shown of an inspection: the documented JSON, pictures, reasons that are true, arithmetic that adds up."""

from __future__ import annotations

import json
import re
from math import ceil
from typing import Any

import numpy as np
import pytest

from connector.errors import ConfigError, HmaError
from connector.plan.build import run_starts
from hma_cli.inspection.explain import explain
from hma_cli.inspection.inspect import PLANS, Inspection
from hma_cli.inspection.merging import reasons
from hma_cli.inspection.pool import PoolState
from hma_cli.inspection.view import STYLES, compared, document, view
from hma_cli.models import catalog
from hma_cli.report.result import Exit
from tests.unit.inspection.samples import inspected

GEMMA = "google/gemma-3-4b-it"
HYBRID = "Qwen/Qwen3-Next-80B-A3B-Instruct"
REMOVED = "microsoft/Phi-4-mini-flash-reasoning"

GROUP = {
    "index": int,
    "kind": str,
    "num_layers": int,
    "window": (int, type(None)),
    "chunk": (int, type(None)),
    "block_size": int,
    "page_bytes": int,
    "blocks_total": int,
    "blocks_moved": int,
    "descriptors": int,
    "runs": int,
    "bytes": int,
}
AMOUNT = {"descriptors": int, "runs": int, "bytes": int}
KINDS = {"full", "sliding_window", "chunked_local", "state", "mla"}


def require_schema(data: dict[str, Any]) -> None:
    """Keys and types of `hma.plan/1` as they were agreed on."""
    assert {"model": str, "source": str, "prompt_tokens": int}.items() <= {
        key: type(value) for key, value in data.items()
    }.items()
    assert data["groups"]
    for index, group in enumerate(data["groups"]):
        for key, kind in GROUP.items():
            assert isinstance(group[key], kind), key  # type: ignore[arg-type]
        assert group["index"] == index
        assert group["kind"] in KINDS
        assert 0 <= group["blocks_moved"] <= group["blocks_total"]
        assert group["num_layers"] == len(group["layers"]) == sum(group["page_sizes"].values())
    assert list(data["totals"]) == ["no_hma", "in_tree", "hma", "lower_bound"]
    for name, amount in data["totals"].items():
        if amount is None:
            assert name in data["refused"]
        else:
            assert {key: type(value) for key, value in amount.items()} == AMOUNT


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", catalog.names())
def test_json_of_every_published_model(name: str, tp: int) -> None:
    try:
        found = inspected(name, prefill_tp=tp, decode_tp=tp)
    except HmaError as error:
        refusal: HmaError | None = error
    else:
        refusal = None
    if refusal is not None:
        assert name == REMOVED or (tp == 2 and isinstance(refusal, ConfigError)), refusal
        assert refusal.remedy
        return
    data = document(found)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    require_schema(data)
    total = data["totals"]["hma"]
    for key in ("descriptors", "bytes"):
        assert sum(group[key] for group in data["groups"]) == total[key]
    assert data["totals"]["lower_bound"]["bytes"] <= total["bytes"]
    if data["totals"]["in_tree"] is not None:
        assert total["bytes"] <= data["totals"]["in_tree"]["bytes"]
    if data["totals"]["no_hma"] is not None:
        assert total["bytes"] <= data["totals"]["no_hma"]["bytes"]


def test_a_view_holds_the_same_for_people_and_for_programs() -> None:
    found = inspected(GEMMA, prompt_tokens=4032, prefill_block_size=64, decode_block_size=64)
    result = view(found, group=5)
    assert (result.schema, result.exit_code) == ("hma.plan/1", Exit.OK)
    assert result.text.startswith("Group 5")
    assert [row[0] for row in result.tables[0].rows] == list(range(7))
    assert [record["plan"] for record in result.records] == ["hma"] * 7 + [f"{name} total" for name in PLANS]
    assert len({tuple(record) for record in result.records}) == 1


def test_a_plan_that_is_refused_is_a_dash_and_a_reason() -> None:
    result = view(inspected(HYBRID))
    assert result.data["totals"]["no_hma"] is None
    assert "cannot be allocated as full attention" in result.data["refused"]["no_hma"]
    assert result.tables[1].rows[0][1:] == ("–",) * 5
    assert any(finding.text.startswith("without HMA: ") for finding in result.findings)
    assert compared(inspected(HYBRID), inspected(GEMMA)).data["compare"]["totals"]["no_hma"]


@pytest.mark.parametrize("cached", [0, 1024, 3520, 4016])
def test_the_picture_is_the_live_range_cut_where_d_has_it(cached: int) -> None:
    found = inspected(GEMMA, prompt_tokens=4032, cached_tokens=cached)
    (picture,) = view(found).pictures
    assert (picture.length, list(picture.styles)) == (4032, list(STYLES))
    for (label, spans), planned in zip(picture.bars, found.plan.groups, strict=True):
        assert label == f"{planned.index} {planned.kind.name}"
        marks = {token: span.style for span in spans for token in range(span.start, span.stop)}
        live = set(planned.kind.live_range(4031))
        for token in range(4031):
            expected = "dead" if token not in live else "cached" if token < cached else "moves"
            assert marks[token] == expected
        assert 4031 not in marks  # the last prompt token is computed on D


LINES = re.compile(r"^  (?P<name>\S+(?: \S+)*?)  +(?P<text>.*)$", re.MULTILINE)
WORDS = re.compile(
    r"\b(tokens a latent|tokens|KV heads|elements|bytes|pairs of blocks|pieces of a page|pages|ranks of D|blocks)\b",
    re.ASCII,
)


def value(expression: str) -> float:
    """The number that an expression in the explanation comes to."""
    plain = WORDS.sub("", expression.replace(",", "")).replace("×", "*").strip()
    assert re.fullmatch(r"[0-9+*/() ceil]+", plain), plain
    return float(eval(plain, {"__builtins__": {}, "ceil": ceil}))


def require_true(found: Inspection, index: int) -> int:
    """Every equation in a group's explanation holds. Returns how many there were."""
    text = explain(found, index)
    lines = dict.fromkeys(("page", "blocks", "descriptors", "in-tree", "bytes", "live", "cached on D"), "")
    lines |= {match["name"]: match["text"] for match in LINES.finditer(text)}
    planned, checked = found.plan.groups[index], 0
    if lines["page"]:
        left, right = lines["page"].split(" = ")
        assert value(left) == value(right.split(" bytes")[0])
        checked += 1
    if lines["blocks"]:
        parts, counted = lines["blocks"].rsplit(": ", 1)
        first, last = (part.split(" = ") for part in parts.split(" … "))
        assert (value(first[0]), value(last[0])) == (value(first[1]), value(last[1]))
        assert value(counted.split(" of ")[0]) == value(last[1]) - value(first[1]) + 1
        checked += 1
    if lines["cached on D"]:
        tokens, blocks = lines["cached on D"].split(", so positions")[0].split(" = ")
        assert value(tokens) == value(blocks) * found.groups[index].block_size
        checked += 1
    if lines["descriptors"]:
        left, right = lines["descriptors"].split(" = ")
        count, runs = right.split(", in ")
        assert (value(count), value(runs.removesuffix(" runs"))) == (planned.amount.descriptors, planned.amount.runs)
        assert value(left) == value(count)
        checked += 1
    if lines["bytes"]:
        assert value(lines["bytes"]) == planned.amount.num_bytes
    if lines["in-tree"].startswith("ceil"):
        left, right = lines["in-tree"].split(" blocks,")[0].split(" = ")
        assert value(left) == value(right)
        checked += 1
    return checked


@pytest.mark.parametrize("name", [name for name in catalog.names() if name != REMOVED])
def test_explained_arithmetic_is_true(name: str) -> None:
    for request in ({}, {"prompt_tokens": 1}, {"prompt_tokens": 10_000, "kv_dtype": "fp8"}):
        found = inspected(name, **request)
        checked = sum(require_true(found, index) for index in range(len(found.groups)))
        assert checked >= len(found.groups)


@pytest.mark.parametrize(
    "request_",
    [
        {"cached_tokens": 1024},
        {"prefill_tp": 2, "decode_tp": 2},
        {"prefill_tp": 1, "decode_tp": 4},
        {"prefill_tp": 4, "decode_tp": 1},
        {"prefill_block_size": 16, "decode_block_size": 64},
        {"prefill_block_size": 64, "decode_block_size": 16, "cached_tokens": 16},
        {"memory_layout": "block_outermost"},
        {"pool": PoolState.RANDOM, "seed": 3},
    ],
    ids=str,
)
def test_explained_arithmetic_is_true_whatever_is_asked(request_: dict[str, Any]) -> None:
    found = inspected(GEMMA, prompt_tokens=3001, **request_)
    assert all(require_true(found, index) for index in range(len(found.groups)))


def test_there_is_no_group_beyond_the_last() -> None:
    for index in (7, -1):
        with pytest.raises(ConfigError, match="There is no group") as caught:
            explain(inspected(GEMMA), index)
        assert "from 0 to 6" in caught.value.remedy


def test_one_run_a_page_needs_no_reason() -> None:
    assert reasons(inspected(GEMMA, prompt_tokens=1000).case, inspected(GEMMA, prompt_tokens=1000).plan.groups) == ()


@pytest.mark.parametrize("pool", list(PoolState))
@pytest.mark.parametrize("name", [GEMMA, "openai/gpt-oss-20b", "google/gemma-3-270m", "Qwen/Qwen3-0.6B"])
def test_the_reasons_count_what_the_block_ids_do(name: str, pool: PoolState) -> None:
    found = inspected(name, prompt_tokens=9000, pool=pool, seed=1)
    said = dict[int, str]()
    for text in reasons(found.case, found.plan.groups):
        for index in named(text):
            said[index] = text
    for group in found.plan.groups:
        order = np.argsort(group.pairs.remote, kind="stable")
        runs = int(np.count_nonzero(run_starts(group.pairs.local[order], group.pairs.remote[order])))
        assert group.amount.runs == runs * len(found.groups[group.index].layers)
        if runs == 1:
            assert group.index not in said
        else:
            assert f"{len(group.pairs):,} blocks move in {runs:,} runs a page" in said[group.index]
            assert {"fresh": "steps of 2,048", "steady": "freed blocks", "random": "arbitrary"}[pool.value] in said[
                group.index
            ]


def named(text: str) -> list[int]:
    """The groups that a reason is about."""
    head = text.split(":")[0]
    if "–" in head:
        first, last = re.findall(r"\d+", head)
        return list(range(int(first), int(last) + 1))
    return [int(number) for number in re.findall(r"\d+", head)]


def test_padded_states_never_merge_and_that_is_said() -> None:
    found = inspected(HYBRID, prompt_tokens=9000)
    for group in found.plan.groups:
        if group.kind.name == "state":
            assert group.amount.runs == group.amount.descriptors
    outermost = inspected(GEMMA, prompt_tokens=9000, memory_layout="block_outermost")
    (text,) = [text for text in reasons(outermost.case, outermost.plan.groups) if "no two blocks merge" in text]
    assert named(text) == [5]  # the group that is one layer short does not fill its blocks
    short = outermost.plan.groups[5]
    assert short.amount.runs == len(short.pairs)


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ({"prefill_tp": 1, "decode_tp": 4}, "of 4 KV heads a rank of P holds 4 and a rank of D 1"),
        ({"prefill_tp": 4, "decode_tp": 2}, "of 4 KV heads a rank of P holds 1 and a rank of D 2"),
        ({"prefill_block_size": 16, "decode_block_size": 64}, "holds 16 tokens on P and 64 on D"),
        ({"prefill_block_size": 32, "decode_block_size": 16}, "holds 32 tokens on P and 16 on D"),
    ],
    ids=str,
)
def test_pages_in_pieces_never_merge_and_that_is_said(request_: dict[str, Any], told: str) -> None:
    found = inspected(GEMMA, prompt_tokens=4032, **request_)
    (text,) = reasons(found.case, found.plan.groups)
    assert named(text) == list(range(7))
    assert told in text
    assert found.plan.total.runs == found.plan.total.descriptors


def test_ranks_that_hold_the_same_head_are_alike() -> None:
    found = inspected(GEMMA, prompt_tokens=1000, prefill_tp=4, decode_tp=8)
    assert reasons(found.case, found.plan.groups) == ()


def test_where_the_values_came_from_is_said() -> None:
    result = view(inspected(GEMMA))
    last = result.findings[-1].text
    assert last.startswith(f"{GEMMA}: config.json from catalog")
    assert "text_config.sliding_window_pattern" in last and "class default of Gemma3TextConfig" in last
    assert result.data["origins"]["text_config.head_dim"] == "class default of Gemma3TextConfig"


@pytest.mark.parametrize(("ssm_dtype", "num_bytes"), [("auto", 194_560), ("float32", 358_400)])
def test_states_are_planned_in_the_data_type_that_is_asked_for(ssm_dtype: str, num_bytes: int) -> None:
    """The bytes of a state are those that vLLM's own classes ask for, on processors without and with AVX-512 BF16."""
    found = inspected("state-spaces/mamba-2.8b-hf", device="cpu", ssm_dtype=ssm_dtype)
    assert found.plan.total.num_bytes == 64 * num_bytes
    assert any("--ssm-dtype float32" in note for note in found.notes) == (ssm_dtype == "auto")
    assert document(found)["ssm_dtype"] == ssm_dtype


def test_models_without_states_are_told_nothing_about_them() -> None:
    assert not any("--ssm-dtype" in note for note in inspected(GEMMA, device="cpu").notes)
