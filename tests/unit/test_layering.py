"""What may import what. The plan, the messages and the command line work where neither vLLM, torch nor NIXL is."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("vllm", "torch", "nixl", "zmq")
PURE = ("connector/plan", "connector/wire", "hma_cli/models")


def imports(path: Path) -> set[str]:
    """Modules that a file imports when it is imported: not inside functions, not for types only."""
    found: set[str] = set()
    pending: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += ast.iter_child_nodes(node)
    return found


def every_import(path: Path) -> set[str]:
    """Modules that a file names in any import statement, wherever it stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, folder
    return found


def reachable(path: Path) -> set[str]:
    """All modules that importing a file imports, through the project's own modules."""
    seen: set[str] = set()
    pending = imports(path)
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        for candidate in (ROOT / (module.replace(".", "/") + ".py"), ROOT / module.replace(".", "/") / "__init__.py"):
            if candidate.is_file() and module.split(".")[0] in ("connector", "hma_cli"):
                pending |= imports(candidate)
    return seen


@pytest.mark.parametrize("path", [path for folder in PURE for path in files(folder)], ids=str)
def test_pure_packages_import_nothing_heavy(path: Path) -> None:
    heavy = {module for module in reachable(path) if module.split(".")[0] in HEAVY}
    assert heavy == set()


@pytest.mark.parametrize("path", [*files("connector/plan"), *files("connector/wire")], ids=str)
def test_plan_and_wire_do_not_import_it_inside_a_function_either(path: Path) -> None:
    assert not {module for module in every_import(path) if module.split(".")[0] in (*HEAVY, "transformers")}


@pytest.mark.parametrize("path", files("connector"), ids=str)
def test_only_the_engine_package_imports_vllm_and_never_its_nixl_connector(path: Path) -> None:
    vllm = {module for module in every_import(path) if module.split(".")[0] == "vllm"}
    if "engine" not in path.parts:
        assert vllm == set()
    assert not {module for module in vllm if ".nixl" in module or "multi_connector" in module}


BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ImportError(f'{{name}} is blocked')
sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize(
    "code",
    [
        "import connector.plan.build, connector.plan.capacity, connector.wire.compare, connector.wire.offers",
        "import connector.wire.claims, connector.wire.codec, connector.wire.handle",
        "import hma_cli.models.embedded",
        "sys.argv = ['hma', '--help']; from hma_cli.app import app; app(standalone_mode=False)",
        "sys.argv = ['hma', 'launch', '--help']; from hma_cli.app import app; app(standalone_mode=False)",
    ],
)
def test_the_light_parts_work_without_the_stack(code: str) -> None:
    blocked = (*HEAVY, "transformers", "lm_eval", "datasets")
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER.format(blocked=blocked) + code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_help_is_quick() -> None:
    """Half a second of processor time, best of five: what is measured is our imports, not who else is at work here."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        code = "import sys; sys.argv = ['hma', '--help']; from hma_cli.app import main; main()"
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5
