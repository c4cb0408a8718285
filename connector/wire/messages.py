"""Messages of the control channel (scheduler to scheduler).

D asks, P answers; every request has one reply. All fields are validated when a message is decoded: types by msgspec,
sizes by the limits below. What has been decoded is trusted afterwards.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

PROTOCOL = 2
MAX_ID = 8192
MAX_BLOCKS = 1 << 20
MAX_CLAIMS = 4096
MAX_DIGESTS = 6 << 20

Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
ShortText = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=4096)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Address = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Positive = Annotated[int, Meta(ge=1, le=1 << 40)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class _Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class RegionDescription(_Message, frozen=True, kw_only=True):
    """`plan.Region` on the wire: bytes throughout."""

    base: Address
    stride: Positive
    block_bytes: Positive
    num_blocks: Positive
    device: Annotated[int, Meta(ge=0, le=1024)] = 0


class PageDescription(_Message, frozen=True, kw_only=True):
    """`plan.Page` on the wire. region: index into `RankDescription.regions`; the rest in bytes."""

    region: Count
    offset: Count
    num_bytes: Positive


class ShareDescription(_Message, frozen=True, kw_only=True):
    """`plan.Share` on the wire: which of a group's parts a rank holds."""

    first: Count
    count: Positive
    total: Positive


class GroupDescription(_Message, frozen=True, kw_only=True):
    """One cache group: what a peer needs to pair blocks, and a reader to understand it.

    page_bytes: one block in the group's first layer, all its pages. pages: for each layer with a cache of its own one,
    or two where K and V lie apart; the same on every rank. kernel_blocks: into how many a block is cut. cut: what a
    kernel block may be cut into on its way.
    """

    index: Count
    kind: ShortText
    window: Positive | None
    chunk: Positive | None
    num_layers: Positive
    block_size: Positive
    page_bytes: Positive
    layers: Annotated[tuple[ShortText, ...], Meta(max_length=4096)]
    pages: Annotated[tuple[PageDescription, ...], Meta(max_length=8192)]
    kernel_blocks: Positive = 1
    cut: Literal["whole", "heads", "tokens"] = "whole"


class RankDescription(_Message, frozen=True, kw_only=True):
    """One worker's memory: its transport's connection data, its regions, and its share of each group."""

    transport: ShortText
    memory: ShortText
    connection: Annotated[bytes, Meta(max_length=1 << 20)]
    regions: Annotated[tuple[RegionDescription, ...], Meta(max_length=8192)]
    shares: Annotated[tuple[ShareDescription, ...], Meta(max_length=1024)]


class CapacityDescription(_Message, frozen=True, kw_only=True):
    """KV capacity in tokens for requests of `request_tokens` tokens, with HMA and without."""

    request_tokens: Count
    hma_tokens: Count
    full_tokens: Count


class EngineDescription(_Message, frozen=True, kw_only=True):
    """Everything a peer or an operator may know of an engine.

    fields: name to value of what must fit between two peers, compared by `wire.compare`.
    """

    engine_id: Id
    epoch: Id
    role: ShortText
    model: Text
    versions: Annotated[dict[ShortText, ShortText], Meta(max_length=64)]
    fields: Annotated[dict[ShortText, Text], Meta(max_length=256)]
    groups: Annotated[tuple[GroupDescription, ...], Meta(max_length=1024)]
    ranks: Annotated[tuple[RankDescription, ...], Meta(max_length=256)]
    num_blocks: Count
    hma_enabled: bool
    prefix_caching: bool
    capacity: CapacityDescription


class OfferedBlocks(_Message, frozen=True, kw_only=True):
    """One group's live blocks: `ids[i]` holds block position `first + i`.

    digests: where P publishes them, of every block's pages, block by block; else empty.
    """

    first: Count
    ids: Annotated[tuple[Positive, ...], Meta(max_length=MAX_BLOCKS)]
    digests: Annotated[bytes, Meta(max_length=MAX_DIGESTS)] = b""


class Describe(_Message, frozen=True, kw_only=True, tag="describe"):
    """Who are you? Reply: Described."""


class Claim(_Message, frozen=True, kw_only=True, tag="claim"):
    """D wants to read one offer. Reply: Granted or Refused.

    epoch: the P life that made the offer. claimant: D's epoch. token: this claim of D's, so that one handle used by two
    requests is granted once. digest: of D's own prompt.
    fingerprint: of the fields D compared, so that P can refuse a peer that does not fit.
    """

    request_id: Id
    epoch: Id
    claimant: Id
    token: Id
    digest: Digest
    fingerprint: Digest


class Renew(_Message, frozen=True, kw_only=True, tag="renew"):
    """Keep the claims of these requests alive. Reply: Renewed."""

    epoch: Id
    claimant: Id
    request_ids: Annotated[tuple[Id, ...], Meta(min_length=1, max_length=MAX_CLAIMS)]


class Release(_Message, frozen=True, kw_only=True, tag="release"):
    """D has read, or will not read, what it claimed. Reply: Released, with those that ended by it."""

    epoch: Id
    claimant: Id
    request_ids: Annotated[tuple[Id, ...], Meta(min_length=1, max_length=MAX_CLAIMS)]


class Decline(_Message, frozen=True, kw_only=True, tag="decline"):
    """D's server has refused the request before its engine saw a prompt: nobody will claim this offer. Reply: Released,
    with its id unless somebody has claimed it."""

    epoch: Id
    request_id: Id


class Described(_Message, frozen=True, kw_only=True, tag="described"):
    engine: EngineDescription


class Granted(_Message, frozen=True, kw_only=True, tag="granted"):
    """The offer's blocks, readable for `valid_seconds` from the moment D *sent* its claim.

    request_id: the offer that was granted; another one than asked for when a sibling of the same list of prompts fits.
    """

    request_id: Id
    num_tokens: Positive
    valid_seconds: Seconds
    groups: Annotated[tuple[OfferedBlocks, ...], Meta(max_length=1024)]


class Refused(_Message, frozen=True, kw_only=True, tag="refused"):
    """No. `reason` is one of `wire.offers.Refusal`.

    salt: with `unauthorised`, what the macs of requests to this life of the server must cover.
    """

    reason: ShortText
    detail: Text = ""
    salt: Annotated[bytes, Meta(max_length=64)] = b""


class NotYet(_Message, frozen=True, kw_only=True, tag="not_yet"):
    """The offer is good, but its digests are still being computed: ask again in `seconds`."""

    seconds: Seconds


class Renewed(_Message, frozen=True, kw_only=True, tag="renewed"):
    """These stay valid for `valid_seconds` from the moment D sent the renewal; those not listed are lost."""

    request_ids: Annotated[tuple[Id, ...], Meta(max_length=MAX_CLAIMS)]
    valid_seconds: Seconds


class Released(_Message, frozen=True, kw_only=True, tag="released"):
    request_ids: Annotated[tuple[Id, ...], Meta(max_length=MAX_CLAIMS)]


Request = Describe | Claim | Renew | Release | Decline
Reply = Described | Granted | NotYet | Refused | Renewed | Released

request_decoder = msgspec.msgpack.Decoder(Request)
reply_decoder = msgspec.msgpack.Decoder(Reply)
encoder = msgspec.msgpack.Encoder()
