"""Two engines compared: each difference by name, with both values and the remedy."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from connector.errors import ConfigError, IncompatiblePeer
from connector.wire.compare import check, compare, fingerprint
from connector.wire.described import geometry_of
from connector.wire.messages import EngineDescription
from tests.unit.connector.describe import engine_description


def changed(path: str, value: Any) -> EngineDescription:
    """The description with one value replaced; `groups.0.window` names a place."""
    raw = msgspec.to_builtins(engine_description())
    *way, last = path.split(".")
    place = raw
    for step in way:
        place = place[int(step)] if step.isdigit() else place[step]
    place[int(last) if last.isdigit() else last] = value
    return msgspec.convert(raw, EngineDescription)


def test_equal_engines_have_no_difference_and_one_fingerprint() -> None:
    ours, theirs = engine_description(), engine_description(engine_id="other", epoch="z" * 32)
    assert compare(ours, theirs) == ()
    assert fingerprint(ours) == fingerprint(theirs)
    check(ours, theirs)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("fields.model", "another", "model"),
        ("fields.kv_dtype", "fp8", "kv_dtype"),
        ("fields.hma", "off", "hma"),
        ("groups.0.window", 128, "groups[0].window"),
        ("groups.0.kind", "chunked_local", "groups[0].kind"),
        ("groups.1.layers", ["x"], "groups[1].layers"),
        ("groups.1.block_size", 24, "groups[1].block_size"),
        ("ranks.0.memory", "VRAM", "memory"),
        ("ranks.0.transport", "loopback", "transport"),
        ("groups.0.pages.0.num_bytes", 32, "groups[0].pages.num_bytes"),
        ("groups.0.pages.0.region", 9, "groups[0].pages"),
        ("groups.0.pages", [], "groups[0].pages"),
        ("ranks.0.shares.0.total", 2, "groups[0] (sliding_window).parts"),
        ("ranks", [], "tp_size"),
    ],
)
def test_each_difference_is_refused_by_name(path: str, value: Any, named: str) -> None:
    ours, theirs = engine_description(), changed(path, value)
    refused = [found for found in compare(ours, theirs) if found.verdict == "refused"]
    assert named in [found.field for found in refused]
    assert all(found.remedy for found in refused)
    with pytest.raises(IncompatiblePeer, match="does not fit") as caught:
        check(ours, theirs)
    assert caught.value.ours != caught.value.theirs
    # Sizes and places of pages may differ where they can be joined; D, which reads, decides that.
    joined = ("pages" in path, "shares" in path, "block_size" in path)
    assert (fingerprint(ours) == fingerprint(theirs)) is any(joined)


def test_another_block_size_everywhere_is_named_once() -> None:
    raw = msgspec.to_builtins(engine_description())
    for group in raw["groups"]:
        group["block_size"], group["page_bytes"] = 32, group["page_bytes"] * 2
        for page in group["pages"]:
            page["num_bytes"] *= 2
    for region in raw["ranks"][0]["regions"]:
        region["block_bytes"], region["stride"] = region["block_bytes"] * 2, region["stride"] * 2
    found = compare(engine_description(), msgspec.convert(raw, EngineDescription))
    assert [(one.field, one.ours, one.theirs, one.verdict) for one in found] == [
        ("block_size", "16", "32", "compatible")
    ]
    assert "--block-size" in found[0].remedy


def test_tensor_parallel_sizes_may_differ_but_not_for_states() -> None:
    raw = msgspec.to_builtins(engine_description())
    raw["ranks"] = [{**raw["ranks"][0], "shares": [{"first": r, "count": 1, "total": 2}] * 2} for r in range(2)]
    both = msgspec.convert(raw, EngineDescription)
    raw["ranks"] = [{**raw["ranks"][0], "shares": [{"first": 0, "count": 2, "total": 2}] * 2}]
    one = msgspec.convert(raw, EngineDescription)
    assert [(found.field, found.verdict) for found in compare(one, both)] == [("tp_size", "compatible")]
    raw["ranks"] = [{**raw["ranks"][0], "shares": [{"first": 0, "count": 1, "total": 1}] * 2}]
    undivided = msgspec.convert(raw, EngineDescription)
    assert "groups[0] (sliding_window).parts" in [f.field for f in compare(undivided, both) if f.verdict == "refused"]


def test_verified_pages_must_be_of_one_size() -> None:
    raw = msgspec.to_builtins(engine_description())
    raw["fields"]["verify_pages"] = "on"
    ours = msgspec.convert(raw, EngineDescription)
    for group in raw["groups"]:
        group["block_size"] = 32
    theirs = msgspec.convert(raw, EngineDescription)
    assert [(one.field, one.verdict) for one in compare(ours, theirs)] == [("block_size", "refused")]


@pytest.mark.parametrize(("path", "value"), [("num_blocks", 7), ("prefix_caching", True)])
def test_differences_that_do_not_matter_are_told(path: str, value: Any) -> None:
    ours, theirs = engine_description(), changed(path, value)
    assert [found.verdict for found in compare(ours, theirs)] == ["compatible"]
    check(ours, theirs)


def test_a_described_geometry_is_a_plans_geometry() -> None:
    geometry = geometry_of(engine_description())
    assert [group.kind.name for group in geometry.groups] == ["sliding_window", "full"]
    assert geometry.num_blocks == 50
    with pytest.raises(ConfigError, match="no rank 1"):
        geometry_of(engine_description(), rank=1)
    with pytest.raises(ConfigError, match="Unknown group kind"):
        geometry_of(changed("groups.0.kind", "sink"))
