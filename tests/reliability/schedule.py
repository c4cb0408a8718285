"""What happens to a soaked pair, and when: pure, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "closed", "silent"]
Target = Literal["P", "D", "control"]
Habit = Literal[
    "plain", "leaves during", "leaves between", "edits the handle", "uses an old handle", "sends a list", "is refused"
]

# Kinds of disturbance: weight, what is hit, and how long in leases (0: until its restart is done).
_DISTURBANCES: tuple[tuple[int, Kind, Target, tuple[float, float]], ...] = (
    (2, "kill", "P", (0, 0)),
    (2, "kill", "D", (0, 0)),
    (4, "stop", "P", (0.1, 0.8)),
    (2, "stop", "P", (1.5, 2.5)),
    (4, "stop", "D", (0.1, 0.8)),
    (2, "stop", "D", (2.0, 3.2)),
    (4, "closed", "control", (0.2, 1.5)),
    (4, "silent", "control", (0.2, 1.5)),
)
_HABITS: dict[Habit, int] = {
    "plain": 78,
    "leaves during": 7,
    "leaves between": 3,
    "edits the handle": 5,
    "uses an old handle": 3,
    "sends a list": 2,
    "is refused": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """at: seconds from the start. seconds: how long it lasts; a killed server is started again at once."""

    at: float
    kind: Kind
    target: Target
    seconds: float


def disturbances(seed: int, seconds: float, lease: float) -> tuple[Disturbance, ...]:
    """One disturbance after the other, with pauses of 4 to 14 s, from the fifth second to the last tenth of the time.

    >>> disturbances(1, 600, 6) == disturbances(1, 600, 6)
    True
    """
    rng = random.Random(f"disturbances/{seed}")
    made = []
    at = 5.0
    while at < 0.9 * seconds:
        _, kind, target, (least, most) = rng.choices(_DISTURBANCES, [weight for weight, *_ in _DISTURBANCES])[0]
        one = Disturbance(at=at, kind=kind, target=target, seconds=rng.uniform(least, most) * lease)
        made.append(one)
        at += one.seconds + rng.uniform(4, 14)
    return tuple(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What one client does. prompt: number among the prompts. pause: seconds until it leaves. edit: draws what it
    changes in the handle."""

    habit: Habit
    prompt: int
    count: int
    pause: float
    edit: int


def visit(seed: int, number: int, prompts: int, output: int) -> Visit:
    """The client with this number; the same in every run of a seed."""
    rng = random.Random(f"visit/{seed}/{number}")
    return Visit(
        habit=rng.choices(tuple(_HABITS), tuple(_HABITS.values()))[0],
        prompt=rng.randrange(prompts),
        count=rng.randint(1, output),
        pause=rng.uniform(0, 0.6),
        edit=rng.randrange(1 << 16),
    )
