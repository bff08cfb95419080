"""The house's rules, read from the source: who may import whom, and what may not be written where.

Imports only point downward: a unit imports its own rank's siblings never, lower ranks freely.
"""

import ast
import pkgutil
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "truegate"

# Rank of each unit (a folder or file of src/truegate): it imports units of lower rank, and itself.
RANK = {
    "errors": 0, "__init__": 0,
    "law": 1, "config": 1, "hub": 1,
    "types": 2, "dist": 2, "rows": 3, "kernels": 2,
    "cache": 4, "layers": 5, "moe": 5,
    "models": 6,
    "sched": 6,
    "engine": 7,
    "llm": 8, "serve": 8,
    "evals": 3, "canary": 4, "bench": 8, "verdict": 8,
    "cli": 9, "__main__": 10,
}  # fmt: skip
TRUST = {"law", "canary", "evals"}  # installs without torch: these see law, errors, each other and HTTP
TRUST_SEES = {"errors", "__init__", *TRUST}
BASE = {  # what `pip install truegate` brings
    "numpy", "ml_dtypes", "safetensors", "tokenizers", "httpx", "typer", "rich", "jinja2", "click",
}  # fmt: skip
SHORT = 430  # lines of a file: "about 400"; kernels are exempt


@cache
def sources() -> dict[str, ast.Module]:
    """Path below src/truegate -> its tree."""
    return {str(p.relative_to(SOURCE)): ast.parse(p.read_text()) for p in sorted(SOURCE.rglob("*.py"))}


def unit(path: str) -> str:
    return Path(path).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> list[tuple[str, int]]:
    """(module, line) of every import anywhere in `tree`; `from truegate import x` counts as truegate.x."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            if node.module == "truegate":
                found += [(f"truegate.{alias.name}", node.lineno) for alias in node.names]
            else:
                found.append((node.module, node.lineno))
    return found


def at_import(tree: ast.Module) -> list[tuple[str, int]]:
    """Imports that run when the module is imported: not those inside functions or under TYPE_CHECKING."""
    body, found = list(tree.body), []
    while body:
        node = body.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            body += node.orelse
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += imports(node)
        body += list(ast.iter_child_nodes(node))
    return found


def guarded(tree: ast.Module) -> set[int]:
    """Lines of imports inside functions of a file that catches ImportError: it says what to install."""
    handlers = [n.type for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.type is not None]
    if not any("ImportError" in ast.unparse(h) for h in handlers):
        return set()
    return {line for _, line in imports(tree)} - {line for _, line in at_import(tree)}


def ours(module: str) -> str | None:
    """The unit that an import names, None for other packages."""
    parts = module.split(".")
    if parts[0] != "truegate":
        return None
    name = parts[1] if len(parts) > 1 else "__init__"
    return name if (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file() else "__init__"


@pytest.mark.parametrize("path", sources())
def test_imports_point_downward(path):
    here = unit(path)
    assert here in RANK, f"{here} has no rank: give it one here and in the plan of the house"
    if here == "__init__":
        return  # its lazy names point at the whole package
    for module, line in imports(sources()[path]):
        there = ours(module)
        if there is not None and there != here:
            assert RANK[there] < RANK[here], f"{path}:{line} imports {module}, which is not below {here}"


@pytest.mark.parametrize("path", [p for p in sources() if unit(p) in TRUST])
def test_trust_tools_import_no_engine_and_no_torch(path):
    for module, line in imports(sources()[path]):
        there, package = ours(module), module.split(".")[0]
        if there is not None:
            assert there in TRUST_SEES, f"{path}:{line} imports {module}"
        else:
            known = package in BASE or package in sys.stdlib_module_names or line in guarded(sources()[path])
            assert known, f"{path}:{line} imports {package}, which the base install does not bring"


@pytest.mark.parametrize("path", [p for p in sources() if unit(p) == "law"])
def test_law_is_numpy_and_the_standard_library(path):
    allowed = {"numpy", "ml_dtypes"}  # the second: numpy's narrow dtypes
    for module, line in imports(sources()[path]):
        there, package = ours(module), module.split(".")[0]
        assert there in (None, "law", "errors"), f"{path}:{line} imports {module}"
        assert there or package in allowed or package in sys.stdlib_module_names, f"{path}:{line} imports {module}"


def backend_files() -> list[str]:
    folders = ("moe/routers/", "moe/experts/", "moe/dispatch/")
    return [p for p in sources() if p.startswith(folders) and not p.endswith("__init__.py")]


@pytest.mark.parametrize("path", backend_files())
def test_a_backends_module_level_imports_law_only(path):
    for module, line in at_import(sources()[path]):
        package = module.split(".")[0]
        light = module in ("truegate.moe.need", "truegate.moe.sent") or ours(module) in ("law", "errors")
        assert light or package == "numpy" or package in sys.stdlib_module_names, f"{path}:{line} imports {module}"


@pytest.mark.parametrize("path", backend_files())
def test_a_backend_is_a_contract_and_a_build(path):
    defined = {
        target.id: node
        for node in sources()[path].body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    functions = {node.name for node in sources()[path].body if isinstance(node, ast.FunctionDef)}
    assert "CONTRACT" in defined
    assert "build" in functions
    name = next(k.value.value for k in defined["CONTRACT"].value.keywords if k.arg == "name")
    assert name == Path(path).stem  # the file's name is the flag's value


def test_an_optional_package_is_imported_only_in_the_file_named_after_it():
    optional = ("aiter", "deep_gemm", "deep_ep", "mori", "flashinfer", "triton", "triton_kernels", "matplotlib")
    homes = {"deep_ep": ("deepep_normal", "deepep_low_latency"), "triton_kernels": ("triton",)}
    for path, tree in sources().items():
        for module, line in imports(tree):
            package = module.split(".")[0]
            if package in optional and unit(path) != "kernels":
                stem = Path(path).stem
                named = stem in homes.get(package, (package,)) or stem.startswith(package)
                assert named, f"{path}:{line} imports {package}"


@pytest.mark.parametrize("path", sources())
def test_no_cycle_hides_under_type_checking(path):
    """A name of ours imported for types only would break a cycle; a heavy package for types only is no cycle."""
    for node in ast.walk(sources()[path]):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for module, line in imports(node):
                assert ours(module) is None, f"{path}:{line}: {module} under TYPE_CHECKING"


def backend_names() -> set[str]:
    folders = (SOURCE / "moe" / part for part in ("routers", "experts", "dispatch"))
    return {m.name for folder in folders for m in pkgutil.iter_modules([str(folder)])}


NEUTRAL = [p for p in sources() if unit(p) == "models" or p in ("moe/layer.py", "moe/recorder.py")]


@pytest.mark.parametrize("path", NEUTRAL)
def test_models_and_the_layer_know_no_scale_backend_or_expert_id(path):
    tree = sources()[path]
    text = (SOURCE / path).read_text()
    assert "routed_scaling_factor" not in text
    assert "routed_scale" not in text
    constants = [n for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    strings = {n.value for n in constants if isinstance(n.value, str)}
    assert not strings & (backend_names() - {"torch", "local"}), "a backend's name"
    words = r"\b(" + "|".join(sorted(backend_names() - {"torch", "local", "triton"})) + r")\b"
    assert not re.search(words, text), "a backend's name"
    for node in ast.walk(tree):  # an expert's or a rank's number compared with or put in place of an id
        if isinstance(node, ast.Compare) and re.search(r"ids|expert|rank", ast.unparse(node.left)):
            for other in node.comparators:
                literal = isinstance(other, ast.Constant) and isinstance(other.value, int)
                assert not (literal and not isinstance(other.value, bool) and other.value > 1), ast.unparse(node)


def test_a_layers_forward_is_its_heart():
    tree = sources()["moe/layer.py"]
    forward = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "forward")
    called = [ast.unparse(n.func) for n in ast.walk(forward) if isinstance(n, ast.Call)]
    for call in ("self.gate", "self.router", "self.dispatch.send", "self.shared", "self.dispatch.combine",
                 "self.experts", "self.plan.finish"):  # fmt: skip
        assert called.count(call) == 1, call
    assert not any(isinstance(n, ast.Mult | ast.Div) for n in ast.walk(forward)), "forward multiplies by something"


def test_one_caller_of_collectives():
    """Activations move in rows.py and moe/dispatch, groups are made in dist.py; nobody else calls a collective."""
    verbs = r"\b(all_reduce|all_gather\w*|reduce_scatter\w*|all_to_all\w*)\("
    for path in sources():
        if path in ("rows.py", "dist.py") or path.startswith("moe/dispatch/"):
            continue
        assert not re.search(verbs, (SOURCE / path).read_text()), path


def test_files_are_short():
    long = {}
    for path in sources():
        lines = (SOURCE / path).read_text().count("\n")
        if lines > SHORT and unit(path) != "kernels":
            long[path] = lines
    assert not long, f"above {SHORT} lines: {long}"


def test_the_budget_is_printed(capsys):
    """Lines by unit, for whoever runs with -s; heart and engine have about 9,000 to spend."""
    total: dict[str, int] = {}
    for path in sources():
        total[unit(path)] = total.get(unit(path), 0) + (SOURCE / path).read_text().count("\n")
    engine = sum(n for u, n in total.items() if u not in ("canary", "evals", "bench", "verdict", "kernels", "cli"))
    with capsys.disabled():
        print(f"\nlines: engine and heart {engine} of about 9000; " + ", ".join(f"{u} {n}" for u, n in total.items()))
    assert sum(total.values()) > 0


BLOCKED = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages!r}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
"""
HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "triton", "huggingface_hub", "llguidance")


def without_torch(code: str, *argv: str) -> subprocess.CompletedProcess:
    program = BLOCKED.format(packages=HEAVY) + code
    return subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, timeout=120)


def test_law_canary_evals_and_contracts_import_without_torch():
    modules = [
        "truegate." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in sources()
        if unit(path) in TRUST or path in backend_files() or path in ("moe/backends.py", "moe/show.py", "cli.py")
    ]
    done = without_torch(f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\nprint('all')")
    assert done.stdout.strip() == "all", done.stderr


def test_plan_runs_without_torch(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "deepseek_v3", "num_hidden_layers": 4, "first_k_dense_replace": 3, "n_routed_experts": 256,'
        '"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "hidden_size": 7168,'
        '"moe_intermediate_size": 2048, "n_shared_experts": 1}'
    )
    code = "from truegate.cli import main; main()"
    done = without_torch(code, "plan", str(config), "--ep", "8", "--experts", "aiter", "--dispatch", "mori", "--json")
    assert done.returncode == 0, done.stderr
    assert '"shared_weight": 1.0' in done.stdout


def test_names_that_need_torch_say_so_without_it():
    done = without_torch("import truegate\ntry: truegate.LLM\nexcept Exception as e: print(e)")
    assert "pip install 'truegate[serve]'" in done.stdout, done.stderr
