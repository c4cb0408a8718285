"""Frames, digests, handles: what is accepted, and that nothing else gets in."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.errors import ConfigError, ProtocolError
from connector.wire.codec import MAX_FRAME, Codec, Unauthorised, keys_from_environment
from connector.wire.digest import prompt_digest
from connector.wire.handle import Handle
from connector.wire.messages import (
    PROTOCOL,
    Claim,
    Decline,
    Describe,
    Granted,
    OfferedBlocks,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
)

KEY = b"k" * 32
CLAIM = Claim(request_id="r", epoch="e", claimant="d", token="t", digest=b"1" * 32, fingerprint=b"2" * 32)
REQUESTS = [
    Describe(),
    CLAIM,
    Renew(epoch="e", claimant="d", request_ids=("a", "b")),
    Release(epoch="e", claimant="d", request_ids=("a",)),
    Decline(epoch="e", request_id="a"),
]
REPLIES = [
    Granted(request_id="r", num_tokens=3, valid_seconds=1.5, groups=(OfferedBlocks(first=2, ids=(7, 9)),)),
    Refused(reason="digest"),
    Renewed(request_ids=("a",), valid_seconds=2.0),
    Released(request_ids=()),
]


@pytest.mark.parametrize("key", [(), (KEY,)], ids=["open", "keyed"])
@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_requests_come_back(key: tuple[bytes, ...], message: Any) -> None:
    frame, nonce = Codec(key).request(message, salt=b"salt")
    assert Codec(key).read_request(frame, salt=b"salt") == (message, nonce, key[0] if key else b"")


@pytest.mark.parametrize("key", [(), (KEY,)], ids=["open", "keyed"])
@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_replies_come_back_with_their_requests_nonce(key: tuple[bytes, ...], message: Any) -> None:
    nonce = bytes(range(16))
    assert Codec(key).read_reply(Codec(key).reply(message, nonce)) == (message, nonce)


@given(st.data())
def test_with_a_key_any_flipped_bit_is_refused(data: st.DataObject) -> None:
    frame, _ = Codec((KEY,)).request(CLAIM)
    index = data.draw(st.integers(0, len(frame) - 1))
    flipped = bytes([*frame[:index], frame[index] ^ (1 << data.draw(st.integers(0, 7))), *frame[index + 1 :]])
    with pytest.raises(ProtocolError):
        Codec((KEY,)).read_request(flipped)


def test_no_key_another_key_and_another_direction_are_unauthorised() -> None:
    for other in (Codec(), Codec((b"x" * 32,))):
        with pytest.raises(Unauthorised):
            Codec((KEY,)).read_request(other.request(CLAIM)[0])
    with pytest.raises(Unauthorised):
        Codec().read_request(Codec((KEY,)).request(CLAIM)[0])
    with pytest.raises(Unauthorised):
        Codec((KEY,)).read_reply(Codec((KEY,)).request(CLAIM)[0])
    with pytest.raises(Unauthorised):
        Codec((KEY,)).read_request(Codec((KEY,)).request(CLAIM, salt=b"one")[0], salt=b"two")


def test_two_keys_are_accepted_and_the_reply_is_sealed_like_its_request() -> None:
    other = b"o" * 32
    p, old, new = Codec((KEY, other)), Codec((KEY,)), Codec((other,))
    for d, key in ((old, KEY), (new, other)):
        frame, nonce = d.request(CLAIM)
        _, _, sealed = p.read_request(frame)
        assert sealed == key
        assert d.read_reply(p.reply(Refused(reason="unknown"), nonce, sealed)) == (Refused(reason="unknown"), nonce)


def test_no_two_requests_have_one_nonce() -> None:
    codecs = [Codec(), Codec()]
    nonces = [codec.request(CLAIM)[1] for codec in codecs for _ in range(100)]
    assert len(set(nonces)) == 200


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_a_protocol_error(junk: bytes) -> None:
    for frame in (junk, b"HMA\x01\x00" + junk, b"HMA\x01\x00" + bytes(16) + junk):
        for read in (Codec().read_request, Codec().read_reply):
            with contextlib.suppress(ProtocolError):
                read(frame)
        assert len(Codec().nonce_of(frame)) == 16


def test_cut_and_oversized_frames_and_other_protocols() -> None:
    frame, _ = Codec().request(CLAIM)
    for length in range(len(frame)):
        with pytest.raises(ProtocolError):
            Codec().read_request(frame[:length])
    with pytest.raises(ProtocolError, match="over the limit"):
        Codec().read_request(frame[:4] + b"\x00" + bytes(MAX_FRAME))
    with pytest.raises(ProtocolError, match="protocol version"):
        Codec().read_request(b"HMA" + bytes([PROTOCOL + 1]) + frame[4:])


def test_the_key_is_not_shown_and_is_read_from_the_environment(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert "kkk" not in repr(Codec((KEY,)))
    path = tmp_path / "key"
    path.write_text("y" * 40 + "\n")
    assert keys_from_environment({}) == ()
    assert keys_from_environment({"HMA_KEY": "z" * 20}) == (b"z" * 20,)
    assert keys_from_environment({"HMA_KEY": "z" * 20 + " , " + "a" * 20}) == (b"z" * 20, b"a" * 20)
    assert keys_from_environment({"HMA_KEY_FILE": str(path)}) == (b"y" * 40,)
    path.write_text("y" * 40 + "\n\n" + "w" * 40 + "\n")
    assert keys_from_environment({"HMA_KEY_FILE": str(path)}) == (b"y" * 40, b"w" * 40)
    for keys in ("short", "z" * 20 + ",short"):
        with pytest.raises(ConfigError, match="at least 16") as caught:
            keys_from_environment({"HMA_KEY": keys})
        assert "zzz" not in str(caught.value)
    for keys in (",", ",".join(["z" * 20] * 3)):
        with pytest.raises(ConfigError, match="shared keys"):
            keys_from_environment({"HMA_KEY": keys})
    with pytest.raises(ConfigError, match="key file"):
        keys_from_environment({"HMA_KEY_FILE": str(tmp_path / "none")})


def test_the_digest_tells_apart_all_that_changes_the_kv() -> None:
    prompts = [
        prompt_digest([1, 2, 3]),
        prompt_digest([1, 2, 4]),
        prompt_digest([1, 2]),
        prompt_digest([1, 2, 3], adapter="a"),
        prompt_digest([1, 2, 3], salt="a"),
        prompt_digest([1, 2, 3], media=("a",)),
        prompt_digest([1, 2, 3], media=("a", "b")),
        prompt_digest([1, 2, 3], media=("ab",)),
    ]
    assert len(set(prompts)) == len(prompts)
    assert prompt_digest([1, 2, 3]) == prompts[0]
    assert len(prompt_digest([1], salt="\ud800")) == 32  # no text of a client can fail here


HANDLE = Handle(engine_id="P", epoch="e" * 32, request_id="cmpl-1-0-ab", host="127.0.0.1", port=5000)


def test_a_handle_comes_back_from_its_parameters() -> None:
    params = HANDLE.to_params(num_tokens=12, tp_size=1)
    assert Handle.from_params(params) == HANDLE
    assert params["do_remote_prefill"] is True
    assert params["remote_block_ids"] == []
    assert params["remote_num_tokens"] == 12


@pytest.mark.parametrize(
    "change",
    [
        {"remote_engine_id": "no-epoch"},
        {"remote_engine_id": "@x"},
        {"remote_engine_id": 7},
        {"remote_request_id": ""},
        {"remote_request_id": None},
        {"remote_request_id": "x" * 9000},
        {"remote_request_id": "\ud800"},
        {"remote_host": ["127.0.0.1"]},
        {"remote_host": "h" * 300},
        {"remote_port": 0},
        {"remote_port": 70000},
        {"remote_port": True},
        {"remote_port": "5000"},
        {"remote_port": 5000.0},
    ],
    ids=str,
)
def test_a_malformed_handle_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        Handle.from_params(HANDLE.to_params(num_tokens=12, tp_size=1) | change)
