"""The scheduler side: P makes offers, D claims them, and both give blocks back.

vLLM calls this from the scheduler's thread only; `Outbound` and `Inbound` hold what the control threads share.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1.request import RequestStatus

from connector import __version__
from connector.control.client import ControlClient
from connector.control.inbound import Inbound
from connector.control.outbound import Outbound
from connector.control.peers import AllowedPeers, own_host
from connector.control.server import ControlServer
from connector.engine.metadata import RankMetadata, StepMetadata, WorkerMetadata
from connector.engine.metrics import GAUGE, HmaStats
from connector.engine.prompts import computes_whole_prompt, shorten_prompt, transfer_digest, transferable
from connector.engine.settings import Settings
from connector.engine.specs import comparable_fields
from connector.errors import ConfigError
from connector.plan.build import Blocks, Pairs, live_blocks, pair_blocks
from connector.plan.capacity import capacity
from connector.plan.geometry import Geometry
from connector.transport.digests import cut_out
from connector.transport.loader import Load
from connector.wire.claims import Event, InboundClaim, State
from connector.wire.codec import Codec, keys_from_environment
from connector.wire.described import described_groups, described_regions, described_shares
from connector.wire.guards import Limits
from connector.wire.handle import Handle
from connector.wire.messages import (
    PROTOCOL,
    CapacityDescription,
    EngineDescription,
    Granted,
    RankDescription,
)
from connector.wire.offers import Offer, parent_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.hma")

OFFERABLE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerSide:
    """One engine's half, for both roles: any engine can prefill for others and decode from others."""

    def __init__(self, config: VllmConfig, settings: Settings) -> None:
        assert config.kv_transfer_config is not None, "vLLM makes a connector only with a transfer config"
        self._config, self._settings = config, settings
        self._transfer = config.kv_transfer_config
        self._recomputes = self._transfer.kv_load_failure_policy == "recompute"
        self._engine_id = str(self._transfer.engine_id)
        self._epoch = uuid.uuid4().hex
        self._host = settings.advertised_host or own_host(settings.control_host)
        self._producing: dict[str, bytes] = {}  # P's running requests that will be offered, and their digests
        self._reported: set[str] = set()  # D's requests that the worker must report, each once
        self._failed: dict[str, str] = {}  # why loads failed that have not been reported by all ranks
        self._told_leases: dict[str, float] = {}
        self._connected: set[str] = set()
        self._step = StepMetadata()
        self._stats = HmaStats()
        self._last_waiting = 0
        self._geometry: Geometry | None = None
        self._outbound: Outbound | None = None
        self._inbound: Inbound | None = None
        self._server: ControlServer | None = None
        self._client: ControlClient | None = None

    # Start and end -----------------------------------------------------------------------------------------------

    def start(self, ranks: dict[int, RankMetadata]) -> None:
        """The workers have registered their memory: describe this engine and open the control channel."""
        expected = self._config.parallel_config.tensor_parallel_size
        if set(ranks) != set(range(expected)):
            raise ConfigError(f"Handshake data of ranks {sorted(ranks)}, expected of {expected}.")
        self._geometry = ranks[0].geometry
        engine = self._describe([ranks[number] for number in sorted(ranks)])
        codec = Codec(keys_from_environment())
        allowed = AllowedPeers(self._settings.allowed_peers)
        self._outbound = Outbound(engine, lease=self._settings.lease_seconds)
        self._inbound = Inbound(
            engine,
            claim_timeout=self._settings.claim_timeout,
            load_timeout=self._settings.load_timeout,
            allowed=allowed,
        )
        self._server = ControlServer(
            self._settings.control_host,
            self._settings.control_port,
            codec,
            self._outbound.handle,
            self._outbound.count_refused,
            allowed=allowed,
            limits=Limits(rate=self._settings.control_rate, burst=4 * self._settings.control_rate),
        )
        self._client = ControlClient(codec, self._inbound.tick)
        self._inbound.attach(self._client)
        logger.info(
            "HMA connector: engine %s, epoch %s, control channel on %s:%d (%s), groups: %s",
            self._engine_id,
            self._epoch,
            self._settings.control_host,
            self._server.port,
            "authenticated" if codec.keys else "not authenticated",
            ", ".join(f"{g.kind}[{g.num_layers}]" for g in engine.groups),
        )

    def close(self) -> None:
        """Give back what this engine claimed, as far as peers answer, and close the channel."""
        if self._inbound is not None:
            self._inbound.close()
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.close()

    # A request's way -----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """P: shorten the prompt by its last token. D: ask for the offer, before the request is first scheduled."""
        params = request.kv_transfer_params
        if not isinstance(params, dict):
            return
        if not transferable(request):
            # Also how vLLM tells of a request that its server has refused: without its prompt, to be aborted at once.
            if params.get("do_remote_prefill") and self._inbound is not None:
                self._inbound.decline(params)
            return
        if params.get("do_remote_decode"):
            digest = transfer_digest(request)
            shorten_prompt(request)
            self._producing[request.request_id] = digest
        elif params.get("do_remote_prefill"):
            assert self._inbound is not None, "requests arrive after the handshake data"
            digest = transfer_digest(request)
            self._inbound.open(request.request_id, params, digest, request.num_prompt_tokens - 1)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """D: tokens that a granted claim brings beyond the `computed` ones; None while the answer is out."""
        claim = self._inbound.poll(request.request_id) if self._inbound is not None else None
        if claim is None or claim.state is State.LOADING:
            return 0, False
        if claim.state is State.ASKED:
            return None, False
        missing = claim.num_tokens - computed
        if missing <= 0 or computes_whole_prompt(request):
            self._end(claim, Event.SKIP if claim.state is State.GRANTED else Event.GIVE_UP)
            return 0, False
        if claim.state is State.GRANTED:
            return missing, True
        if not self._recomputes:
            return 1, True  # the least that vLLM loads; `after_alloc` has the worker fail it
        self._fall_back(claim.reason, claim)
        return 0, False

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """D: blocks are there; make the plan and hand it to the worker."""
        if external == 0 or self._inbound is None:
            return
        claim = self._inbound.poll(request.request_id)
        assert claim is not None, "vLLM loads only what matched_tokens reported"
        self._reported.add(request.request_id)
        peer = self._inbound.peer_of(claim)
        if claim.state is not State.GRANTED or peer is None or not peer.geometries:
            self._refuse(claim, claim.reason or "lapsed")
            return
        try:
            load = self._plan(claim, peer.geometries[0], blocks, claim.num_tokens - external)
        except ConfigError as error:
            logger.error("Request %s cannot be loaded: %s", request.request_id, error)
            self._refuse(claim, "plan")
            return
        if peer.epoch not in self._connected:
            self._connected.add(peer.epoch)
            self._step.peers[peer.epoch] = peer.memory
        self._step.loads.append(load)
        self._inbound.move(request.request_id, Event.LOAD)
        self._told_leases[request.request_id] = load.valid_until

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """A request ends. P: offer its live blocks and keep them. D: give up what it still claims."""
        digest = self._producing.pop(request.request_id, None)
        if digest is None:
            self._leave(request.request_id)
            return False, None
        num_tokens = request.num_prompt_tokens  # shortened: what D loads
        if request.status not in OFFERABLE or request.num_computed_tokens < num_tokens:
            return False, None
        blocks = self._live(block_ids, num_tokens)
        if blocks is None:
            logger.warning("Request %s ended without all of its live blocks; no offer is made", request.request_id)
            return False, None
        assert self._outbound is not None and self._server is not None
        self._outbound.offer(
            Offer(
                request_id=request.request_id,
                parent=parent_of(request.request_id),
                digest=digest,
                num_tokens=num_tokens,
                blocks=blocks,
                digests=None if self._settings.verify_pages else (),
            )
        )
        if self._settings.verify_pages:
            self._step.published[request.request_id] = tuple(group.ids for group in blocks)
        handle = Handle(
            engine_id=self._engine_id,
            epoch=self._epoch,
            request_id=request.request_id,
            host=self._host,
            port=self._server.port,
        )
        return True, handle.to_params(
            num_tokens=num_tokens + 1, tp_size=self._config.parallel_config.tensor_parallel_size
        )

    # Each step -----------------------------------------------------------------------------------------------------

    def step_metadata(self) -> StepMetadata:
        """What the worker is to do in this step; the next one starts empty."""
        step, self._step = self._step, StepMetadata()
        if self._outbound is not None:
            step.freed = self._outbound.take_freed()
        if self._inbound is not None:
            step.dropped = self._inbound.take_dropped()
            self._connected.difference_update(step.dropped)
            leases = self._inbound.leases()
            step.leases = {rid: until for rid, until in leases.items() if self._told_leases.get(rid) != until}
            self._told_leases = leases
        return step

    def on_output(self, output: KVConnectorOutput) -> None:
        """Digests are there, loads have ended.

        Reports of requests that are not awaited never reach vLLM, which would assert on them.
        """
        if self._inbound is None or self._outbound is None:
            return
        if isinstance(output.kv_connector_worker_meta, WorkerMetadata):
            for request_id, digests in output.kv_connector_worker_meta.digests.items():
                self._outbound.publish(request_id, digests)
            self._failed |= output.kv_connector_worker_meta.failed
        for name in ("finished_recving", "failed_recving"):
            reported = getattr(output, name) or set()
            if stray := reported - self._reported:
                logger.warning("Completions of unknown requests are ignored: %s", sorted(stray))
                setattr(output, name, reported & self._reported)
        for request_id in output.finished_recving or ():
            self._reported.discard(request_id)
            self._count_ended(request_id, failed=request_id in (output.failed_recving or ()))
            self._inbound.move(request_id, Event.FINISH)

    def take_stats(self) -> HmaStats | None:
        """Counts since the last call, None when nothing has changed."""
        if self._outbound is not None:
            granted, refused, expired = self._outbound.take_counts()
            self._stats.count("claims_granted", granted)
            self._stats.count("leases_expired", expired)
            for reason, amount in refused.items():
                self._stats.count_labelled("claims_refused", reason, amount=amount)
        waiting = self._inbound.waiting() if self._inbound is not None else 0
        if waiting != self._last_waiting:
            self._last_waiting = self._stats.data[GAUGE] = waiting
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, HmaStats()
        return stats

    # Internals ---------------------------------------------------------------------------------------------------

    def _describe(self, ranks: Sequence[RankMetadata]) -> EngineDescription:
        geometry, config = ranks[0].geometry, self._config
        hma_on = not config.scheduler_config.disable_hybrid_kv_cache_manager
        tokens = capacity(geometry, config.model_config.max_model_len)
        return EngineDescription(
            engine_id=self._engine_id,
            epoch=self._epoch,
            role=str(self._transfer.kv_role),
            model=str(config.model_config.model),
            versions={"hma": __version__, "vllm": vllm.__version__, "protocol": str(PROTOCOL)},
            fields=comparable_fields(
                config, ranks[0].layout, PROTOCOL, vllm.__version__, verify_pages=self._settings.verify_pages
            ),
            groups=described_groups(geometry),
            ranks=tuple(
                RankDescription(
                    transport=rank.transport,
                    memory=rank.memory,
                    connection=rank.connection,
                    regions=described_regions(rank.geometry),
                    shares=described_shares(rank.geometry),
                )
                for rank in ranks
            ),
            num_blocks=min(rank.geometry.num_blocks for rank in ranks),
            hma_enabled=hma_on,
            prefix_caching=bool(config.cache_config.enable_prefix_caching),
            capacity=CapacityDescription(
                request_tokens=tokens.request_tokens, hma_tokens=tokens.hma_tokens, full_tokens=tokens.full_tokens
            ),
        )

    def _live(self, block_ids: tuple[list[int], ...], num_tokens: int) -> tuple[Blocks, ...] | None:
        assert self._geometry is not None
        found = []
        for group, table in zip(self._geometry.groups, block_ids, strict=True):
            blocks = live_blocks(group.kind, group.block_size, table, num_tokens)
            if blocks is None:
                return None
            found.append(blocks)
        return tuple(found)

    def _plan(self, claim: InboundClaim, peer: Geometry, blocks: KVCacheBlocks, cached: int) -> Load:
        assert self._geometry is not None and self._inbound is not None and claim.grant is not None
        pairs = tuple(
            pair_blocks(
                kind=group.kind,
                block_size=group.block_size,
                num_tokens=claim.num_tokens,
                cached_tokens=cached,
                remote_block_size=theirs.block_size,
                offered=Blocks(offered.first, offered.ids),
                table=table,
            )
            for group, theirs, offered, table in zip(
                self._geometry.groups, peer.groups, claim.grant.groups, blocks.get_block_ids(), strict=True
            )
        )
        return Load(
            request_id=claim.request_id,
            epoch=claim.handle.epoch,
            pairs=pairs,
            valid_until=claim.valid_until,
            deadline=self._inbound.load_deadline(),
            digests=self._digests_of(pairs, claim.grant) if self._settings.verify_pages else (),
        )

    def _digests_of(self, pairs: tuple[Pairs, ...], grant: Granted) -> tuple[bytes, ...]:
        """Of what P published, the digests of the blocks that move. Both engines have equal block sizes."""
        assert self._geometry is not None
        return tuple(
            cut_out(
                offered.digests, len(group.pages), pair.first - offered.first, pair.first - offered.first + len(pair)
            )
            for group, pair, offered in zip(self._geometry.groups, pairs, grant.groups, strict=True)
        )

    def _count_ended(self, request_id: str, *, failed: bool) -> None:
        """Every rank has reported a load. What was refused before it began has been counted then."""
        reason = self._failed.pop(request_id, "")
        if not failed:
            self._stats.count("transfers")
        elif reason not in ("", "cancelled"):
            self._stats.count_labelled("fallbacks", reason, self._outcome)

    @property
    def _outcome(self) -> str:
        """What becomes of a request whose KV is not used."""
        return "recomputed" if self._recomputes else "failed"

    def _refuse(self, claim: InboundClaim, reason: str) -> None:
        """Blocks are allocated but will not be loaded: have the worker report the request as failed."""
        self._step.refused.append(claim.request_id)
        self._fall_back(reason, claim)

    def _fall_back(self, reason: str, claim: InboundClaim) -> None:
        logger.warning("Request %s is %s: %s (%s)", claim.request_id, self._outcome, reason, claim.detail)
        self._stats.count_labelled("fallbacks", reason, self._outcome)
        self._end(claim, Event.SKIP if claim.state is State.GRANTED else Event.GIVE_UP)

    def _end(self, claim: InboundClaim, event: Event) -> None:
        assert self._inbound is not None
        self._inbound.move(claim.request_id, event)

    def _leave(self, request_id: str) -> None:
        if self._inbound is None:
            return
        claim = self._inbound.poll(request_id)
        if claim is not None:
            if claim.state is State.LOADING:
                self._step.cancelled.append(request_id)
            self._inbound.move(request_id, Event.CANCEL)
