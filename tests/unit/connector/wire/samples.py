"""Valid messages and descriptions that the wire tests start from, and change one thing of."""

from __future__ import annotations

from connector.wire.messages import (
    CapacityDescription,
    Claim,
    Decline,
    Describe,
    Described,
    EngineDescription,
    Granted,
    GroupDescription,
    NotYet,
    OfferedBlocks,
    PageDescription,
    RankDescription,
    Refused,
    RegionDescription,
    Release,
    Released,
    Renew,
    Renewed,
    ShareDescription,
)

EPOCH = "epoch-1"
DIGEST = bytes(range(32))
FINGERPRINT = bytes(reversed(range(32)))
FIELDS = {
    "model": "gemma",
    "dtype": "bfloat16",
    "kv_dtype": "auto",
    "tp_size": "1",
    "layout": "NHD",
    "connector": "0.1.0",
    "vllm": "0.32.0",
}


def group(
    index: int = 0, *, window: int | None = None, block_size: int = 16, page_bytes: int = 1024
) -> GroupDescription:
    return GroupDescription(
        index=index,
        kind="full" if window is None else "sliding_window",
        window=window,
        chunk=None,
        num_layers=2,
        block_size=block_size,
        page_bytes=page_bytes,
        layers=(f"layers.{2 * index}", f"layers.{2 * index + 1}"),
        pages=tuple(PageDescription(region=region, offset=0, num_bytes=page_bytes) for region in range(2)),
    )


def rank(*, page_bytes: int = 1024, num_blocks: int = 100, regions: int = 2) -> RankDescription:
    ranges = tuple(
        RegionDescription(base=index << 30, stride=page_bytes, block_bytes=page_bytes, num_blocks=num_blocks)
        for index in range(regions)
    )
    shares = (ShareDescription(first=0, count=1, total=1),) * 2
    return RankDescription(transport="nixl", memory="DRAM", connection=b"\x00agent", regions=ranges, shares=shares)


def engine(
    *,
    engine_id: str = "prefill-0",
    fields: dict[str, str] | None = None,
    groups: tuple[GroupDescription, ...] = (group(0), group(1, window=64)),
    ranks: tuple[RankDescription, ...] = (rank(),),
    num_blocks: int = 100,
    prefix_caching: bool = True,
) -> EngineDescription:
    return EngineDescription(
        engine_id=engine_id,
        epoch=EPOCH,
        role="kv_both",
        model="gemma",
        versions={"vllm": "0.32.0"},
        fields=FIELDS if fields is None else fields,
        groups=groups,
        ranks=ranks,
        num_blocks=num_blocks,
        hma_enabled=True,
        prefix_caching=prefix_caching,
        capacity=CapacityDescription(request_tokens=4096, hma_tokens=8192, full_tokens=4096),
    )


def claim(
    request_id: str = "cmpl-a-0-x",
    *,
    epoch: str = EPOCH,
    claimant: str = "decode-1",
    token: str = "t1",
    digest: bytes = DIGEST,
    fingerprint: bytes = FINGERPRINT,
) -> Claim:
    return Claim(
        request_id=request_id, epoch=epoch, claimant=claimant, token=token, digest=digest, fingerprint=fingerprint
    )


REQUESTS = (
    Describe(),
    claim(),
    Renew(epoch=EPOCH, claimant="decode-1", request_ids=("a", "b")),
    Release(epoch=EPOCH, claimant="decode-1", request_ids=("a",)),
    Decline(epoch=EPOCH, request_id="a"),
)
REPLIES = (
    Described(engine=engine()),
    Granted(
        request_id="a",
        num_tokens=99,
        valid_seconds=30.0,
        groups=(OfferedBlocks(first=0, ids=(7, 8, 9)), OfferedBlocks(first=2, ids=(3,), digests=b"12345678")),
    ),
    NotYet(seconds=0.01),
    Refused(reason="unknown", detail="No such offer."),
    Renewed(request_ids=("a",), valid_seconds=30.0),
    Released(request_ids=()),
)
