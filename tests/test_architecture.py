"""Architecture: import layers, optional packages, budgets of size, docstrings. Read with ``ast``."""

from __future__ import annotations

import ast
import difflib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "accel_train"
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
MODULES = sorted(LIBRARY.rglob("*.py"))

VALUES = {"config", "cores", "options", "precision", "rng", "simulated", "wording"}
MECHANISM = {
    *("launch_files", "runtime", "training", "speed", "data", "store"),
    *("checkpoints", "hub", "metrics", "linting"),
}
TOOLS = {"commands", "compare", "rerun", "verification", "watching"}
DOMAINS = {
    *("domains.models", "domains.diffusion"),
    *("domains.text", "domains.pde", "domains.images", "domains.language"),
}
ROWS = (
    VALUES,
    {"launch_files"},
    {"store", "training", "data", "runtime", "speed", "pipeline"},
    {"hub", "checkpoints", "metrics", "linting"},
    {"domains.models", "domains.diffusion"},
    {"domains.text", "domains.pde", "domains.images", "domains.language"},
    {"experiment_options"},
    {"train_state"},
    {"frozen_weights", "initial_weights"},
    {"experiment", "preparation", "startup"},
    {"reporting"},
    {"loop"},
    {"export"},
    {"loading"},
    TOOLS,
    {"cost_model"},
    {"drill", "simulation"},
    {"calibration"},
    {"planning"},
    {"anywhere"},
    {"cli", "recipes", "__init__"},
)
"""Packages from the ground up. A package imports from rows below its own; along a row only as the next table says."""

NEIGHBOURS_ALLOWED = {
    ("options", "config"): "the values that options are made of, which every package imports",
    ("options", "wording"): "parts of messages that every package writes",
    ("runtime", "data.sampler"): "the number of micro-batches, which is refused and derived in one place",
    ("runtime", "speed.compiler"): "what a failed compiler says, to torch.compile and to DeepSpeed alike",
    ("options", "store.names"): "a config that lies in a run is known by its name",
    ("data", "store.names"): "files of a run that lie among the data are known by their names in one place",
    ("speed", "store"): "the smaller micro-batch after running out of memory is recorded in the run directory",
    ("training", "store"): "samples left out after a bad step are recorded in the run directory",
    ("checkpoints", "hub"): "a saver hands what it committed to the Hub, and a start may fetch a checkpoint from there",
    ("hub", "metrics"): "the card of a model tells its metrics from baselines and counts, as the curves do",
    ("compare", "commands.bundled"): "a recipe is found by its path or name in one place",
    ("watching", "commands.places"): "what a directory holds, for a message, is listed in one place",
    ("rerun", "commands.bundled"): "a recipe is found by its path or name in one place",
    ("rerun", "commands.places"): "a run is found by its path in one place",
    ("rerun", "commands.diff"): "checkpoints are compared by the names of their tensors in one place",
    ("rerun", "compare.runs"): "a run is started in a process of its own, and ended with this one, in one place",
    ("verification", "commands.bundled"): "a recipe is found by its path or name in one place",
    ("verification", "commands.diff"): "tensors of two checkpoints are compared in one place",
    ("verification", "compare.runs"): "a recipe's options are read, and stop signals handled, in one place",
    ("loading", "commands.places"): "a checkpoint is found by the path of its run in one place",
    ("rng", "config"): "UsageError alone: the one type for what a person can put right",
}
"""Imports along a row, each with its reason; a dotted target allows that module only."""

ACCELERATE_PACKAGES = {
    *("launch_files", "runtime", "training", "checkpoints", "metrics"),
    *("train_state", "frozen_weights", "initial_weights", "startup", "experiment", "preparation"),
    *("reporting", "loop", "recipes"),
    "commands",  # starts its launcher
    "domains.pde",  # sums figures over the processes
}
ONE_MODULE = {"pydantic": "options.loading", "tyro": "options.help_text", "shtab": "options.completion"}
INSIDE_FUNCTIONS = {
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "diffusers",
    "h5py",
    "kernels",
    "matplotlib",
    "peft",
    "pyarrow",
    "pynvml",
    "scipy",
    "sklearn",
    "tensorboard",
    "tokenizers",
    "torchao",
    "transformers",
    "zarr",
    "PIL",
}
"""Heavy or optional: imported by the function that needs them, so that ``import accel_train.x`` stays fast."""

WITHOUT_DOCSTRING = {
    "Corpus",
    "MMDiTOutput",
    "PreparedData",
    "close",
    "dim",
    "files_hash",
    "load",
    "load_tokenizer",
}
"""Names that say it: records whose fields are described one by one, and verbs that do what they say."""

FORBIDDEN_NAMES = {"utils", "util", "common", "core", "base", "helpers", "misc"}

CHAIN = 7
PACKAGE_FILES = 12
MORE_FILES = {
    "commands": (17, "a file for each command of accel-train"),
}
DOMAIN_FILES = 17
FILE_LINES = 400
MODEL_FILE_LINES = 500
MODEL_FILES = {"accel_train/domains/models/mmdit.py"}
RECIPE_LINES = 240
LOOP_LINES = 25
FUNCTION_LINES = 60
MAIN_LINES = 60
PARAMETERS = 8
OWN_OPTIONS = 25
SHORT_FUNCTION_LINES = 20
SHORT_FUNCTION_SHARE = 0.6

EXCEPTIONS: dict[str, tuple[int, str]] = {}
"""What a budget truly does not fit: its own number, and the reason."""


@dataclass(frozen=True)
class Import:
    """One imported module of one file."""

    path: Path
    line: int
    target: str
    at_top: bool
    """Executed by ``import`` of the file: outside functions and outside ``if TYPE_CHECKING``."""

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: imports {self.target}"


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def package_of_file(path: Path) -> str:
    """``runtime``, ``domains.text``, ``experiment``, ``recipes``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] != "accel_train" else package_of(parts[1:])


def package_of(parts: Sequence[str]) -> str:
    """The package that a module below ``accel_train`` belongs to, from the parts of its name."""
    return ".".join(parts[:2]) if parts[0] == "domains" and parts[1:2] != ("__init__",) else parts[0]


def imports(path: Path) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, at_top: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(path, node.lineno, alias.name, at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.extend(Import(path, node.lineno, f"{node.module}.{alias.name}", at_top) for alias in node.names)
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or _is_type_checking(node)
        for child in ast.iter_child_nodes(node):
            visit(child, at_top and not inside)

    visit(parse(path), True)
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def every_import() -> list[Import]:
    return [item for path in (*MODULES, *RECIPES) for item in imports(path)]


def row_of(package: str) -> int:
    return next(index for index, row in enumerate(ROWS) if package in row)


def test_every_module_is_in_a_row() -> None:
    packages = set().union(*ROWS)
    strangers = [p for p in MODULES if package_of_file(p) not in packages | {"__init__", "domains"}]
    assert not strangers
    assert len(MODULES) > 40
    assert len(RECIPES) >= 1


def diagram() -> list[set[str]]:
    """The rows of CONTRIBUTING.md, from the ground up. Names are in the first 72 columns, words about them behind."""
    fence = (ROOT / "CONTRIBUTING.md").read_text().split("## Architecture")[1].split("```")[1]
    rows = [re.findall(r"[\w/.*]+", line[:72]) for line in fence.strip().splitlines() if "──" not in line]
    return [{name.replace("/*.py", "").replace("/", ".") for name in row} for row in reversed(rows)]


def test_the_diagram_of_contributing_is_the_table() -> None:
    assert diagram() == [row - {"__init__"} for row in ROWS]


def test_contributing_names_every_package_that_imports_accelerate() -> None:
    text = (
        (ROOT / "CONTRIBUTING.md")
        .read_text()
        .split("- `accelerate` is imported only in")[1]
        .split("`domains/models/`")[0]
    )
    named = {name.removesuffix(".py").strip("/").replace("/", ".") for name in re.findall(r"`([\w/.]+)`", text)}
    assert named | {"recipes"} == ACCELERATE_PACKAGES


def test_contributing_states_the_budget_of_a_folder() -> None:
    (stated,) = re.findall(r"^\| files in a folder \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    larger = {limit for limit, _ in MORE_FILES.values()} | {DOMAIN_FILES}
    assert set(map(int, re.findall(r"\d+", stated))) == {PACKAGE_FILES} | larger
    assert all(f"`{name}/`" in stated for name in MORE_FILES)


def test_the_readme_names_every_package() -> None:
    tree = (ROOT / "README.md").read_text().split("## The repository")[1].split("```")[1]
    named = {word.removesuffix(".py").strip("/") for word in re.findall(r"[\w/]+(?:\.py|/)", tree)}
    missing = {name.replace(".", "/") for row in ROWS for name in row} - named - {"recipes", "__init__"}
    assert missing == {"cores", "precision", "simulated", "wording"}  # small files of values


def test_imports_point_down() -> None:
    wrong: list[str] = []
    for item in every_import():
        if not item.target.startswith("accel_train."):
            continue
        target = item.target.removeprefix("accel_train.")
        ours, theirs = package_of_file(item.path), package_of(tuple(target.split(".")))
        if theirs.startswith("__") or ours == theirs:
            continue
        along = any(
            ours == source and (target + ".").startswith(f"{allowed}.") for source, allowed in NEIGHBOURS_ALLOWED
        )
        if row_of(theirs) >= row_of(ours) and not along:
            wrong.append(f"{item} ({ours} is not above {theirs})")
    assert not wrong, "\n".join(wrong)


def test_no_chain_of_imports_is_long() -> None:
    """What a reader must open at most to follow one name to the ground, without what a function imports by itself."""
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in MODULES}
    imported: dict[str, set[str]] = {}
    for name, path in names.items():
        targets = {item.target for item in imports(path) if item.at_top}
        modules = {target if target in names else target.rpartition(".")[0] for target in targets}
        imported[name] = (modules & names.keys()) - {"accel_train", name}

    @cache
    def chain(name: str) -> tuple[str, ...]:
        return (name, *max((chain(below) for below in imported[name]), key=len, default=()))

    longest = max((chain(name) for name in names), key=len)
    assert len(longest) <= CHAIN, " > ".join(longest)
    assert len(longest) > 3


def test_packages_keep_their_budget() -> None:
    sizes: dict[str, int] = {}
    for path in MODULES:
        if path.stem != "__init__" and path.parent != LIBRARY:
            folder = ".".join(path.parent.relative_to(LIBRARY).parts)
            sizes[folder] = sizes.get(folder, 0) + 1
    budget = {name: DOMAIN_FILES if name in DOMAINS else PACKAGE_FILES for name in sizes}
    wrong = over(sizes, budget | {name: limit for name, (limit, _) in MORE_FILES.items()})
    assert not wrong, wrong


DOMAIN_WORDS = re.compile(
    r"mmdit|\bpde|l2t|t2l|\bnll\b|fields\.(png|json)|samples\.md|darcy|advection|shakespeare|latent|tokenizer"
    r"|from accel_train\.domains|domains[/.](models|diffusion|text|pde|images|language)",
    re.IGNORECASE,
)
NAMED_AS_EXAMPLES = {
    "accel_train/launch_files/sharding.py": "MMDiTBlock",
    "accel_train/options/other_scripts.py": "",  # every line: what scripts of each domain call their options
    "accel_train/rng.py": "latent/noise",
    "accel_train/linting/variables.py": "tokenizers",
    "accel_train/data/__init__.py": "latents",
    "accel_train/data/artifacts.py": "tokenizer",
}
"""Words of a domain in a comment or message, where an abstract word would say less. Nothing depends on them."""


def test_mechanism_names_no_domain() -> None:
    mechanism = (
        VALUES | MECHANISM | {"experiment_options", "train_state", "experiment", "preparation", "startup", "loop"}
    )
    mechanism |= {"pipeline", "loading", "export"}
    found: list[str] = []
    for path in MODULES:
        allowed = NAMED_AS_EXAMPLES.get(str(path.relative_to(ROOT)))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            named = package_of_file(path) in mechanism and DOMAIN_WORDS.search(line)
            if named and (allowed is None or allowed not in line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_nothing_imports_a_recipe() -> None:
    wrong = [str(i) for i in every_import() if i.target.split(".")[0] == "recipes"]
    assert not wrong, "\n".join(wrong)


def test_accelerate_stays_in_its_packages() -> None:
    wrong = [
        str(i)
        for i in every_import()
        if i.target.split(".")[0] == "accelerate" and package_of_file(i.path) not in ACCELERATE_PACKAGES
    ]
    assert not wrong, "\n".join(wrong)


def test_pydantic_tyro_and_shtab_are_imported_in_one_module_each() -> None:
    found = {
        (i.target.split(".")[0], i.path.relative_to(LIBRARY).with_suffix("").as_posix().replace("/", "."))
        for i in every_import()
        if i.path.is_relative_to(LIBRARY)
    }
    assert {pair for pair in found if pair[0] in ONE_MODULE} == set(ONE_MODULE.items())


def test_heavy_and_optional_packages_are_imported_inside_functions() -> None:
    slow = ("torch.distributed.fsdp.", "torch.distributed.tensor.")  # a second of CPU that --help has no use for
    found = [i for i in every_import() if i.target.split(".")[0] in INSIDE_FUNCTIONS or i.target.startswith(slow)]
    assert found
    wrong = [str(i) for i in found if i.at_top]
    assert not wrong, "\n".join(wrong)


def test_no_module_of_leftovers() -> None:
    names = [p for p in LIBRARY.rglob("*") if p.is_dir() or p.suffix == ".py"]
    assert not [p for p in names if p.stem in FORBIDDEN_NAMES]


def _functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{child.name}" if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else prefix
            if isinstance(child, ast.FunctionDef):
                yield name, child
            yield from visit(child, f"{name}." if name != prefix else prefix)

    relative = path.relative_to(ROOT)
    return ((f"{relative}:{name}", node) for name, node in visit(parse(path), ""))


def every_function() -> dict[str, ast.FunctionDef]:
    return {name: node for path in (*MODULES, *RECIPES) for name, node in _functions(path)}


def length(node: ast.FunctionDef | ast.For) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def over(sizes: dict[str, int], budget: dict[str, int] | int) -> list[str]:
    """What is larger than its budget and has no exception, or an exception larger than it needs to be."""
    wrong: list[str] = []
    for name, size in sizes.items():
        allowed = budget if isinstance(budget, int) else budget[name]
        limit, _ = EXCEPTIONS.get(name, (allowed, ""))
        if size > limit:
            wrong.append(f"{name}: {size}, budget {limit}")
    return wrong


def test_files_keep_their_budget() -> None:
    sizes, budget = {}, {}
    for path in (*MODULES, *RECIPES):
        name = str(path.relative_to(ROOT))
        sizes[name] = len(path.read_text(encoding="utf-8").splitlines())
        budget[name] = RECIPE_LINES if path in RECIPES else MODEL_FILE_LINES if name in MODEL_FILES else FILE_LINES
    assert not over(sizes, budget), over(sizes, budget)


def test_functions_keep_their_budget() -> None:
    sizes = {name: length(node) for name, node in every_function().items()}
    mains = {f"{p.relative_to(ROOT)}:main" for p in RECIPES}
    wrong = over(sizes, {n: MAIN_LINES if n in mains else FUNCTION_LINES for n in sizes})
    assert not wrong, wrong


def test_the_loop_of_a_recipe_can_be_seen_at_once() -> None:
    for path in RECIPES:
        main = every_function()[f"{path.relative_to(ROOT)}:main"]
        loops = [length(node) for node in ast.walk(main) if isinstance(node, ast.For)]
        assert loops, f"{path}: main has no loop"
        wrong = over({f"{path.relative_to(ROOT)}:loop": max(loops)}, LOOP_LINES)
        assert not wrong, wrong


def test_parameters_keep_their_budget() -> None:
    counts: dict[str, int] = {}
    for name, node in every_function().items():
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        counts[name] = len([n for n in names if n not in ("self", "cls")])
    wrong = over(counts, PARAMETERS)
    assert not wrong, wrong


def test_a_recipe_has_few_options_of_its_own() -> None:
    for path in RECIPES:
        config = next(n for n in parse(path).body if isinstance(n, ast.ClassDef) and n.name == "Config")
        own = [n for n in config.body if isinstance(n, ast.AnnAssign) and not _is_group(n) and not _is_declaration(n)]
        assert len(own) <= OWN_OPTIONS, f"{path.name}: {len(own)} options beside the groups"


def _is_declaration(node: ast.AnnAssign) -> bool:
    return ast.unparse(node.annotation).startswith("ClassVar")


def _is_group(node: ast.AnnAssign) -> bool:
    return isinstance(node.annotation, (ast.Name, ast.Attribute)) and ast.unparse(node.annotation).endswith("Config")


def test_most_functions_are_short() -> None:
    sizes = [length(node) for name, node in every_function().items() if name.startswith("accel_train")]
    share = sum(size <= SHORT_FUNCTION_LINES for size in sizes) / len(sizes)
    print(f"{share:.0%} of {len(sizes)} functions are {SHORT_FUNCTION_LINES} lines or fewer")
    assert share >= SHORT_FUNCTION_SHARE


def test_every_public_name_has_a_docstring() -> None:
    missing: list[str] = []
    for path in MODULES:
        for node in parse(path).body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            members = node.body if isinstance(node, ast.ClassDef) else []
            public = [m for m in members if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")]
            missing += [
                f"{path.relative_to(ROOT)}:{item.lineno}: {item.name}"
                for item in (node, *public)
                if ast.get_docstring(item) is None and not _says_itself(item)
            ]
        if path.stat().st_size and ast.get_docstring(parse(path)) is None:
            missing.append(f"{path.relative_to(ROOT)}: the module")
    assert not missing, "\n".join(missing)


def _says_itself(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """One statement or two, a module's ``forward``, which its class describes, or a name of the list above."""
    short = isinstance(node, ast.FunctionDef) and len(node.body) <= 2
    return short or node.name == "forward" or node.name in WITHOUT_DOCSTRING


COPY_TAX = 0.41
"""Largest share of a recipe's lines that is also found, in order, in the other one. The shorter one pays more. One
hundredth is for the decorator that every ``main`` has (``one_run``)."""


def test_recipes_share_by_import_and_not_by_copy() -> None:
    lines = {path: [line.strip() for line in path.read_text().splitlines() if line.strip()] for path in RECIPES}
    for a, b in itertools.combinations(RECIPES, 2):
        matcher = difflib.SequenceMatcher(None, lines[a], lines[b], autojunk=False)
        common = sum(block.size for block in matcher.get_matching_blocks())
        shares = {path.name: round(common / len(lines[path]), 3) for path in (a, b)}
        print(shares)
        assert max(shares.values()) <= COPY_TAX, shares


def test_every_exception_is_needed_and_explained() -> None:
    names = {*every_function(), *(str(p.relative_to(ROOT)) for p in (*MODULES, *RECIPES))}
    names |= {f"{p.relative_to(ROOT)}:loop" for p in RECIPES}
    for name, (_, reason) in EXCEPTIONS.items():
        assert name in names, f"{name} does not exist any more; delete its exception"
        assert len(reason) > 20, name


@pytest.mark.parametrize(
    ("text", "at_top"),
    [
        ("import scipy", True),
        ("def f():\n    import scipy", False),
        ("if TYPE_CHECKING:\n    import scipy", False),
        ("try:\n    import scipy\nexcept ImportError:\n    pass", True),
        ("class A:\n    import scipy", True),
    ],
)
def test_where_an_import_runs(text: str, at_top: bool, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    (found,) = imports(path)
    assert (found.target, found.at_top) == ("scipy", at_top)
