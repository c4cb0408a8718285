"""A whole run: check up front, ask the single engine, ask the pair, judge. The one shell of this package."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from connector.errors import ConfigError, ResourceError
from hma_cli.evaluation import preflight
from hma_cli.evaluation.evidence import Evidence, Watch
from hma_cli.evaluation.prompts import Prompts, encode, load_tokenizer
from hma_cli.evaluation.questions import Questions
from hma_cli.report.progress import counted
from hma_cli.report.render import talk

if TYPE_CHECKING:
    from hma_cli.cluster.supervisor import LaunchState
    from hma_cli.evaluation.arm import Plan
    from hma_cli.evaluation.samples import Arm
    from hma_cli.evaluation.view import Run

# Both arms of an own launch run eagerly, which starts sooner, and in float32: in bfloat16 one engine's own results
# already differ between a prefill and a decode of the same token, so that a difference would mean little.
OWN_ARGUMENTS = ("--enforce-eager", "--dtype", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for. urls: of servers that run already, None to launch them; model: directory or hub id."""

    questions: Questions
    limit: int
    num_fewshot: int
    concurrency: int
    connector: str
    model: str | None
    urls: Urls | None
    block_size: int | None
    max_model_len: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Urls:
    """Base URLs of running servers."""

    pair: str
    baseline: str
    prefill: str
    decode: str


def verify(request: Request) -> Run:
    """Run both arms and judge them. HmaError for whatever keeps the run from starting."""
    from hma_cli.evaluation.verdict import judge
    from hma_cli.evaluation.view import Run

    request.questions.check(limit=request.limit, num_fewshot=request.num_fewshot)
    arms = _on_running(request, request.urls) if request.urls else _on_own(request)
    return Run(
        plan=arms.plan,
        prompts=arms.prompts,
        server_ids=arms.server_ids,
        baseline=arms.baseline,
        pair=arms.pair,
        evidence=arms.evidence,
        verdict=judge(arms.baseline, arms.pair, arms.evidence, bos_problem=arms.prompts.bos_problem),
    )


def write_output(directory: Path, run: Run, report: dict[str, Any]) -> None:
    """report.json, and for each arm its samples as JSON lines and lm-eval's results."""
    from hma_cli.evaluation.view import sample_lines

    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        for arm in (run.baseline, run.pair):
            lines = "".join(json.dumps(line) + "\n" for line in sample_lines(arm))
            (directory / f"samples-{arm.name}.jsonl").write_text(lines)
            results = json.dumps(arm.lm_eval, indent=2, default=str)
            (directory / f"lm-eval-{arm.name}.json").write_text(results + "\n")
    except OSError as error:
        raise ResourceError(f"{directory} cannot be written: {error}.", remedy="Give another --output.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arms:
    plan: Plan
    prompts: Prompts
    server_ids: dict[str, bool | None]
    baseline: Arm
    pair: Arm
    evidence: Evidence


def _on_running(request: Request, urls: Urls) -> _Arms:
    servers = {
        f"--{name}": preflight.served_model(getattr(urls, name), f"--{name}")
        for name in ("baseline", "prefill", "decode")
    }
    servers["--pair"] = preflight.served_model(urls.pair, "--pair")
    preflight.check_same(servers)
    baseline = servers["--baseline"]
    tokenizer = request.model or _own_tokenizer(baseline)
    limits = [server.max_model_len for server in servers.values() if server.max_model_len]
    prepared = _prepare(request, model=baseline.name, tokenizer=tokenizer, max_length=min(limits, default=2048))
    server_ids = {}
    for option in ("--baseline", "--pair"):
        server_ids[option] = _check_server(servers[option].url, option, prepared)
    alone = _ask("baseline", urls.baseline, prepared.plan)
    through, evidence = _ask_pair(request.connector, urls.pair, (urls.prefill,), (urls.decode,), prepared.plan)
    return _Arms(
        plan=prepared.plan,
        prompts=prepared.prompts,
        server_ids=server_ids,
        baseline=alone,
        pair=through,
        evidence=evidence,
    )


def _on_own(request: Request) -> _Arms:
    """One after the other, so that both arms have the machine to themselves."""
    from hma_cli.cluster.pair import running_engine, running_pair

    sizes: dict[str, Any] = {"block_size": request.block_size, "max_model_len": request.max_model_len or 2048}
    with (
        _told("the single engine") as on_change,
        running_engine(model=request.model, args=OWN_ARGUMENTS, on_change=on_change, **sizes) as engine,
    ):
        served = preflight.served_model(engine.url, "the single engine")
        prepared = _prepare(
            request, model=engine.model_name, tokenizer=engine.model_path, max_length=served.max_model_len
        )
        server_ids = {"baseline": _check_server(engine.url, "baseline", prepared)}
        alone = _ask("baseline", engine.url, prepared.plan)
    with (
        _told("the pair") as on_change,
        running_pair(
            model=request.model,
            connector=request.connector,
            prefill_args=OWN_ARGUMENTS,
            decode_args=OWN_ARGUMENTS,
            on_change=on_change,
            **sizes,
        ) as pair,
    ):
        server_ids["pair"] = _check_server(pair.router_url, "pair", prepared)
        prefill, decode = (tuple(server.url for server in side) for side in (pair.prefill, pair.decode))
        through, evidence = _ask_pair(request.connector, pair.router_url, prefill, decode, prepared.plan)
    return _Arms(
        plan=prepared.plan,
        prompts=prepared.prompts,
        server_ids=server_ids,
        baseline=alone,
        pair=through,
        evidence=evidence,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    plan: Plan
    prompts: Prompts


def _prepare(request: Request, *, model: str, tokenizer: str, max_length: int) -> _Prepared:
    from hma_cli.evaluation.arm import Plan
    from hma_cli.evaluation.task import OUTPUT_TOKENS, build_task, prompts

    texts = prompts(build_task(request.questions, num_fewshot=request.num_fewshot), limit=request.limit)
    encoded = encode(load_tokenizer(tokenizer), texts)
    encoded.check_length(output=OUTPUT_TOKENS, max_model_len=max_length, where="the served model")
    plan = Plan(
        questions=request.questions,
        limit=request.limit,
        num_fewshot=request.num_fewshot,
        model=model,
        tokenizer=tokenizer,
        max_length=max_length,
        concurrency=request.concurrency,
    )
    return _Prepared(plan=plan, prompts=encoded)


def _own_tokenizer(served: preflight.Served) -> str:
    """The server's own model directory, when this machine has it."""
    if not Path(served.root).is_dir():
        raise ConfigError(
            f"{served.url} serves {served.name} from {served.root}, whose tokenizer this machine cannot read.",
            remedy="Give --model with a directory or hub id that holds the served model's tokenizer.",
        )
    return served.root


def _check_server(url: str, option: str, prepared: _Prepared) -> bool | None:
    """The server completes, and whether it encodes the first prompt as it was encoded here."""
    prompts, model = prepared.prompts, prepared.plan.model
    preflight.check_completions(url, option, model, prompts.ids[0][0])
    ids = preflight.server_ids(url, option, model, prompts.texts[0])
    return None if ids is None else ids == prompts.ids[0]


def _ask(name: str, url: str, plan: Plan) -> Arm:
    from hma_cli.evaluation.arm import run_arm

    with counted(f"{name}: {plan.limit} questions", plan.limit) as advance:
        return run_arm(name, url, plan, on_answer=lambda _: advance())


def _ask_pair(
    connector: str, url: str, prefill: tuple[str, ...], decode: tuple[str, ...], plan: Plan
) -> tuple[Arm, Evidence]:
    watch = Watch(connector=connector, prefill=prefill, decode=decode)
    arm = _ask("pair", url, plan)
    return arm, watch.evidence(requests=len(arm.samples))


@contextlib.contextmanager
def _told(what: str) -> Iterator[Callable[[LaunchState], None]]:
    """Tell each stage of a start once."""
    told: set[tuple[str, str]] = set()

    def on_change(state: LaunchState) -> None:
        for child in state.children:
            stage = (child.name, child.stage.text)
            if stage not in told:
                told.add(stage)
                talk(f"[dim]{child.name}: {child.stage.text}[/]")

    talk(f"Starting {what}")
    yield on_change
