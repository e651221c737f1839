"""Cutting one file out of the library: what stays, what goes, and what is refused."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from accel_train.domains.models.mmdit import MMDiT, MMDiTConfig, MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.domains.pde.shape import PdeTransformerConfig
from accel_train.domains.pde.transformer import PdeTransformer
from accel_train.export import sources
from accel_train.export.single_file import NotSelfContainedError, SingleFile, single_file


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of its own in the place of the library."""
    package = tmp_path / "small"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sources, "PACKAGE", "small")
    importlib.invalidate_caches()
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == "small"]:
        del sys.modules[name]


def execute(text: str) -> dict[str, Any]:
    module = ModuleType("cut_out")
    sys.modules["cut_out"] = module
    exec(compile("from __future__ import annotations\n" + text, "cut_out", "exec"), vars(module))
    return vars(module)


def test_definitions_come_with_all_that_they_use_and_nothing_else(library: Path) -> None:
    (library / "numbers.py").write_text(
        '"""Numbers."""\nfrom typing import Annotated\n\nfrom bounds import Gt\n\n'
        'Positive = Annotated[int, Gt(0)]\n# Why it is seven.\nSEVEN = 7\n"""Said behind it."""\nUNUSED = 8\n'
    )
    (library / "shapes.py").write_text(
        "import math\nfrom dataclasses import dataclass\n\nimport pandas\n\nfrom small import numbers\n"
        "from small.numbers import SEVEN, Positive\n\n\n"
        "@dataclass(frozen=True)\nclass Square:\n    side: Positive\n    # above a member\n"
        "    def area(self):\n        return helper(self.side)\n\n"
        "    def frame(self):\n        return pandas.DataFrame([self.side])\n\n\n"
        "def helper(side):\n    return side**2 + SEVEN + numbers.SEVEN\n\n\n"
        "def root(side):\n    return math.sqrt(Square(side).area())\n\n\n"
        "def other():\n    return numbers.UNUSED\n"
    )
    text = SingleFile([("small.shapes", "root")]).text()
    assert execute(text)["root"](3) == (9 + 14) ** 0.5
    assert "Positive = int\n" in text  # bounds are checked by nobody there
    assert '# Why it is seven.\nSEVEN = 7\n"""Said behind it."""' in text
    assert "numbers = SimpleNamespace(SEVEN=SEVEN)" in text
    for gone in ("pandas", "frame", "other", "UNUSED", "Gt"):
        assert gone not in text, gone


def test_members_that_nothing_names_go_from_modules_of_torch(library: Path) -> None:
    (library / "layers.py").write_text(
        "from huggingface_hub import PyTorchModelHubMixin\nfrom torch import nn\n\n\n"
        'class Layer(nn.Module, PyTorchModelHubMixin):\n    """A layer."""\n\n    units = [\'Layer\']\n'
        '    """For a strategy."""\n    scale = 2\n\n    def __init__(self):\n        super().__init__()\n\n'
        "    def forward(self, x):\n        return self.twice(x)\n\n"
        "    def twice(self, x):\n        return self.scale * x\n\n"
        "    @classmethod\n    def _from_pretrained(cls):\n        return PyTorchModelHubMixin\n"
    )
    text = SingleFile([("small.layers", "Layer")]).text()
    assert "class Layer(nn.Module):" in text
    assert execute(text)["Layer"]()(3) == 6
    for gone in ("huggingface_hub", "units", "strategy", "_from_pretrained", "@classmethod"):
        assert gone not in text, gone


def test_what_torch_calls_and_what_strings_name_stays(library: Path) -> None:
    (library / "layers.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Layer(nn.Module):\n    scale = 2\n\n"
        "    def forward(self, x):\n        return getattr(self, 'scale') * x\n\n"
        "    def train(self, mode=True):\n        return super().train(False)\n\n"
        "    def _load_from_state_dict(self, *given):\n        self.loaded = True\n"
    )
    layer = execute(SingleFile([("small.layers", "Layer")]).text())["Layer"]()
    layer.load_state_dict({})
    assert (layer(3), layer.train().training, layer.loaded) == (6, False, True)


def test_a_form_feed_in_a_string_ends_no_line(library: Path) -> None:
    (library / "a.py").write_text("PAGE = 'a\f\x1cb'\n\n\ndef f():\n    return PAGE\n")
    assert execute(SingleFile([("small.a", "f")]).text())["f"]() == "a\f\x1cb"


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("import pandas\ndef f():\n    return pandas", "", "uses pandas of pandas, which the file cannot import"),
        ("from small.b import g as h\ndef f():\n    return h()", "def g(): ...", "import g under its own name"),
        ("from small.b import g\ndef f():\n    return g()", "", "small.b has no definition of g"),
        (
            "from small.b import g\nK = 1\ndef f():\n    return g(K)",
            "K = 2\ndef g(x):\n    return K",
            "K is in small.a and in small.b: rename one",
        ),
        ("def f(): ...\ndef f(): ...", "", "f is defined twice"),
        ("K = 1\nK += 1\ndef f():\n    return K", "", r"small.a, line 2: 'K \+= 1' is not an import"),
        ("if 1:\n    import math as m\nelse:\n    import cmath as m\ndef f():\n    return m", "", "line 1: 'if 1:'"),
        ("try:\n    K = 1\nexcept OSError:\n    K = 2\ndef f():\n    return K", "", "line 1: 'try:'"),
        ("import torch\ntorch.set_default_dtype(torch.float64)\ndef f(): ...", "", "line 2: 'torch.set_default_dtype"),
        ("D = {}\nD['b'] = 2\ndef f():\n    return D", "", "line 2: .* is not an import"),
        ("A, B = 1, 2\ndef f():\n    return A", "", "line 1: .* is not an import"),
        ("from math import *\ndef f():\n    return pi", "", r"line 1: 'from math import \*'"),
        ("from .b import g\ndef f():\n    return g()", "def g(): ...", "line 1: 'from .b import g'"),
        ("from abc import ABCMeta as M\nclass f(metaclass=M): ...", "", "line 2: 'class f"),
        ("def f():\n    from small.b import g\n    return g()", "def g(): ...", "line 2: import small.b at the top"),
        ("def f():\n    import small.b\n    return small.b.g()", "def g(): ...", "line 2: import small.b at the top"),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    K = 1\nelse:\n    K = 2\ndef f():\n    return K",
            "",
            "K depends on TYPE_CHECKING",
        ),
        # What is done in the module of a definition counts as well.
        ("from small.b import g\ndef f():\n    return g()", "def g(): ...\nprint(g)", "small.b, line 2: 'print"),
    ],
)
def test_what_cannot_be_joined_is_refused_by_name(first: str, second: str, reason: str, library: Path) -> None:
    (library / "a.py").write_text(first)
    (library / "b.py").write_text(second)
    with pytest.raises(NotSelfContainedError, match=reason):
        SingleFile([("small.a", "f")])


@pytest.mark.parametrize(
    "roots", [(MultimodalMMDiT, MultimodalMMDiTConfig), (PdeTransformer, PdeTransformerConfig), (MMDiT, MMDiTConfig)]
)
def test_every_model_is_cut_out_with_its_comments(roots: tuple[type, ...]) -> None:
    text = single_file(*roots)
    tree = ast.parse(text)
    names = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    assert len(names) == len(set(names))
    assert {root.__name__ for root in roots} <= set(names)
    assert "# (B, " in text  # shapes trail the line
    assert "accel_train" not in "".join(line for line in text.splitlines() if not line.startswith("# accel_train"))
