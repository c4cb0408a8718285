"""Once-only requests and limits, against plain models of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from connector.wire.guards import WINDOW, Limits, ReplayGuard, Throttle


def nonce(counter: int, sender: int = 0) -> bytes:
    return sender.to_bytes(8, "big") + counter.to_bytes(8, "big")


counters = st.one_of(st.integers(0, 3 * WINDOW), st.sampled_from([0, 1, WINDOW - 1, WINDOW, 2**64 - 1]))


@given(st.lists(st.tuples(st.integers(0, 2), counters), max_size=80))
@settings(max_examples=200)
def test_no_nonce_passes_twice_and_recent_ones_pass_in_any_order(asked: list[tuple[int, int]]) -> None:
    guard, seen, newest = ReplayGuard(), set(), dict.fromkeys(range(3), -1)
    for sender, counter in asked:
        passed = guard.passes(nonce(counter, sender))
        expected = (sender, counter) not in seen and counter > newest[sender] - WINDOW
        assert passed == expected
        if passed:
            seen.add((sender, counter))
            newest[sender] = max(newest[sender], counter)


def test_senders_are_bounded_and_the_least_recent_is_forgotten() -> None:
    guard = ReplayGuard(max_senders=2)
    assert all(guard.passes(nonce(0, sender)) for sender in range(3))
    assert len(guard) == 2
    assert not guard.passes(nonce(0, 2))
    assert guard.passes(nonce(0, 0))  # forgotten: what it was sealed for has its own salt and epoch


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 3)), max_size=200),
    st.floats(1, 50),
    st.integers(1, 20),
)
def test_no_connection_gets_more_than_its_rate_and_burst(
    steps: list[tuple[float, int]], rate: float, burst: int
) -> None:
    throttle = Throttle(Limits(rate=rate, burst=burst, strangers=1e9))
    for connection in range(4):
        throttle.know(bytes([connection]), 0.0)
    now, passed = 0.0, [0] * 4
    for pause, connection in steps:
        now += pause
        passed[connection] += throttle.passes(bytes([connection]), now)
        assert passed[connection] <= burst + rate * now + 1e-6


def test_strangers_share_one_bucket_and_peers_do_not_pay_for_them() -> None:
    throttle = Throttle(Limits(rate=10.0, burst=5.0, strangers=3.0))
    throttle.know(b"peer", 0.0)
    assert [throttle.passes(str(n).encode(), 0.0) for n in range(5)] == [True, True, True, False, False]
    assert throttle.passes(b"peer", 0.0)
    assert throttle.passes(b"new", 1.0)


def test_connections_are_bounded() -> None:
    throttle = Throttle(Limits(max_connections=3))
    for number in range(10):
        throttle.know(bytes([number]), 0.0)
    assert len(throttle) == 3
