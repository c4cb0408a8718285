"""A model and a request in, everything that `hma inspect-plan` shows out. Pure: no printing, no reading of files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from connector.errors import ConfigError
from connector.plan.kinds import Kind, State
from hma_cli.inspection.arena import KvLayout
from hma_cli.inspection.comparison import Amount, HandOver, Plan, in_tree, lower_bound, ours, without_hma
from hma_cli.inspection.engine import D_BASE, P_BASE, Engine, Memory, engine, in_tree_engine
from hma_cli.inspection.pool import PREFILL_STEP, PoolState
from hma_cli.models.architectures import layers_of
from hma_cli.models.blocks import Device, EngineOptions, MemoryLayout
from hma_cli.models.capacity import Capacity, Load, capacity, resident
from hma_cli.models.config import ModelConfig
from hma_cli.models.grouping import Grouping, group_layers
from hma_cli.models.options import AUTO, RankOptions

MAX_PROMPT_TOKENS = 1 << 24
"""Longer than any model takes; in blocks of 16 tokens more than the 2^20 blocks of a group that an offer can name."""

PLANS = ("no_hma", "in_tree", "hma", "lower_bound")
"""The four plans, in the order in which they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked.

    Block sizes: tokens, None for vLLM's own. max_model_len: None for the prompt's length; it matters where a state's
    block spans the whole sequence. num_blocks: in the pools, None for as many as the request needs. memory_bytes: KV
    cache of one rank. bandwidth: bytes a second.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_block_size: int | None = None
    decode_block_size: int | None = None
    device: Device = "cuda"
    dtype: str | None = None
    kv_dtype: str = "auto"
    ssm_dtype: str = "auto"
    kv_layout: KvLayout = KvLayout.PACKED
    memory_layout: MemoryLayout | None = None
    prefix_caching: bool | None = None
    max_model_len: int | None = None
    pool: PoolState = PoolState.FRESH
    seed: int = 0
    num_blocks: int | None = None
    memory_bytes: int = 16 << 30
    bandwidth: float = 12.5e9


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """A cache group as it is shown. page_bytes: of each layer, padding included."""

    kind: Kind
    block_size: int
    layers: tuple[str, ...]
    page_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Requests that a cache holds: while they decode, and as vLLM counts at start-up, with prefill steps under way."""

    decoding: Capacity
    admitted: Capacity


@dataclass(frozen=True)
class Inspection:
    """All figures of one model and request.

    totals: by plan; None where vLLM or the in-tree connector refuses the model, and then `reasons` says why. Figures
    are sums over all ranks of D.
    """

    config: ModelConfig
    request: Request
    prefill: Grouping
    decode: Grouping
    groups: tuple[GroupShape, ...]
    case: HandOver
    plan: Plan
    totals: dict[str, Amount | None]
    reasons: dict[str, str]
    full: Grouping | None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the figures should know: about the file, the groups, and what was not asked for."""
        notes = [*self.config.notes, *self.decode.notes]
        if any(group.kind == State() for group in self.groups):
            if not self.decode.prefix_caching and not self.request.max_model_len:
                notes.append(
                    "without prefix caching a state's block spans the longest request; --max-model-len is not given, "
                    f"so that is the prompt: {self.request.prompt_tokens:,} tokens"
                )
            if self.request.device == "cpu" and self.request.ssm_dtype == AUTO:
                notes.append(
                    "on processors with AVX-512 BF16 vLLM's CPU backend keeps states in float32; "
                    "plan for those with --ssm-dtype float32"
                )
        return tuple(notes)

    @cached_property
    def load(self) -> Load:
        """What runs at once: vLLM schedules the next step while one is under way, but not on CPU."""
        return Load(
            request_tokens=self.request.prompt_tokens,
            max_num_batched_tokens=PREFILL_STEP,
            concurrent_batches=1 if self.request.device == "cpu" else 2,
        )

    @cached_property
    def capacity(self) -> Held:
        """What one rank of D holds with HMA."""
        return self._held(self.decode)

    @cached_property
    def full_capacity(self) -> Held | None:
        """What one rank of D holds without HMA; None where vLLM does not start without it."""
        return self._held(self.full) if self.full is not None else None

    def _held(self, grouping: Grouping) -> Held:
        memory = self.request.memory_bytes
        return Held(
            decoding=resident(grouping, memory, self.request.prompt_tokens),
            admitted=capacity(grouping, memory, self.load),
        )

    def seconds(self, amount: Amount) -> float:
        """Time of the bytes alone at the bandwidth that was asked for."""
        return amount.num_bytes / self.request.bandwidth


def inspect(config: ModelConfig, request: Request) -> Inspection:
    """Plan one hand-over. ModelError and ConfigError for what cannot be planned, naming the field or option."""
    if not 1 <= request.prompt_tokens <= MAX_PROMPT_TOKENS:
        raise ConfigError(
            f"A prompt of {request.prompt_tokens:,} tokens cannot be planned.",
            remedy=f"Give --prompt-tokens from 1 to {MAX_PROMPT_TOKENS:,}.",
        )
    if request.memory_bytes < 1 or request.bandwidth <= 0:
        raise ConfigError("Memory and bandwidth must be more than nothing.")
    prefill, decode = groupings(config, request)
    case = _case(request, prefill, decode, engine)
    plan = ours(case)
    totals: dict[str, Amount | None] = dict.fromkeys(PLANS)
    totals["hma"], totals["lower_bound"] = plan.total, lower_bound(case, plan)
    reasons: dict[str, str] = {}
    full: Grouping | None = None
    try:
        full_prefill, full = groupings(config, request, hma=False)
        totals["no_hma"] = without_hma(_case(request, full_prefill, full, engine))
    except ConfigError as error:
        reasons["no_hma"] = error.message
    try:
        totals["in_tree"] = in_tree(_case(request, prefill, decode, in_tree_engine))
    except ConfigError as error:
        reasons["in_tree"] = error.message
    return Inspection(config, request, prefill, decode, _shapes(decode), case, plan, totals, reasons, full)


def groupings(config: ModelConfig, request: Request, *, hma: bool = True) -> tuple[Grouping, Grouping]:
    """P's and D's groups."""
    sides = ((request.prefill_tp, request.prefill_block_size), (request.decode_tp, request.decode_block_size))
    prefill, decode = (_grouping(config, request, tp, block_size, hma) for tp, block_size in sides)
    return prefill, decode


def _shapes(grouping: Grouping) -> tuple[GroupShape, ...]:
    return tuple(
        GroupShape(
            kind=group.kind,
            block_size=group.block_size,
            layers=tuple(layer.layer.name for layer in group.layers),
            page_bytes=tuple(layer.page_bytes for layer in group.layers),
        )
        for group in grouping.groups
    )


def _grouping(config: ModelConfig, request: Request, tp: int, block_size: int | None, hma: bool) -> Grouping:
    rank = RankOptions(tp=tp, dtype=request.dtype, kv_dtype=request.kv_dtype, ssm_dtype=request.ssm_dtype)
    layers = layers_of(config, rank)
    options = EngineOptions(
        block_size=block_size,
        device=request.device,
        layout=request.memory_layout,
        hma=hma,
        prefix_caching=request.prefix_caching,
        max_model_len=request.max_model_len or request.prompt_tokens,
    )
    return group_layers(layers, options)


def _case(
    request: Request, prefill: Grouping, decode: Grouping, make: Callable[[Grouping, Memory], Engine]
) -> HandOver:
    memory = Memory(
        tp=request.prefill_tp,
        kv_layout=request.kv_layout,
        num_tokens=request.prompt_tokens,
        pool=request.pool,
        num_blocks=request.num_blocks,
        base=P_BASE,
        cut="heads" if request.device == "cpu" else "tokens",  # as `connector.engine.specs` finds it
    )
    return HandOver(
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        prefill=make(prefill, memory),
        decode=make(decode, replace(memory, tp=request.decode_tp, base=D_BASE)),
        pool=request.pool,
        seed=request.seed,
    )
