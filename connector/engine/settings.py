"""The connector's settings: `kv_connector_extra_config`, typed; an unknown key is refused with the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from connector.control.peers import LOOPBACK
from connector.errors import ConfigError


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine.

    control_host, control_port: where the control channel listens; port 0 takes a free one.
    advertised_host: what handles say instead of control_host, for engines behind another address.
    lease_seconds: how long P keeps an unclaimed prompt, and a claim without renewal.
    claim_timeout: seconds until D treats an unanswered claim as refused.
    load_timeout: seconds that a load may take, all of its attempts included, and that D's engine may take over a step;
    P's blocks are then let go.
    allowed_peers: hosts and networks that a handle may name, and that are answered.
    control_rate: requests a second that one peer may send for long; four times as many at once.
    backends: NIXL plugins. part_runs: merged descriptors in one part. max_attempts: posts of one part.
    read_timeout: seconds until a read that does not end counts as failed.
    verify_pages: P publishes a digest of each page, D compares; needs it on both engines, and host memory.
    faults: misfortunes to inject into D's reads (`transport.faulty`), for tests and rehearsals.
    """

    control_host: str = "127.0.0.1"
    control_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    advertised_host: str = ""
    lease_seconds: Annotated[float, Meta(gt=0.1, le=3600)] = 30.0
    claim_timeout: Annotated[float, Meta(gt=0, le=600)] = 5.0
    load_timeout: Annotated[float, Meta(gt=0, le=3600)] = 120.0
    allowed_peers: tuple[str, ...] = LOOPBACK
    control_rate: Annotated[float, Meta(gt=0, le=1e6)] = 500.0
    backends: Annotated[tuple[str, ...], Meta(min_length=1)] = ("UCX",)
    part_runs: Annotated[int, Meta(ge=1, le=65536)] = 1024
    max_attempts: Annotated[int, Meta(ge=1, le=16)] = 4
    read_timeout: Annotated[float, Meta(gt=0, le=3600)] = 20.0
    verify_pages: bool = False
    faults: str = ""


def settings_from(extra_config: Mapping[str, Any]) -> Settings:
    """Validate the extra config. ConfigError names the key, and the nearest known one."""
    names = [field.name for field in msgspec.structs.fields(Settings)]
    for key in extra_config:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            remedy = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(names)}."
            raise ConfigError(f"Unknown connector setting {key!r}.", remedy=remedy)
    try:
        return msgspec.convert(dict(extra_config), Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"A connector setting is wrong: {error}.") from error
