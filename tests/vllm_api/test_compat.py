# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM has everything that the plugin builds on, and the check notices when it has not."""

import ast
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import vllm

import vllm_magicdec
from vllm_magicdec.vllm_api import compat
from vllm_magicdec.vllm_api.compat import CALLED, HOOKED, Needed, find_change, find_problem
from vllm_magicdec.vllm_api.vllm_source import Source, tree_reader
from vllm_magicdec.vllm_api.vllm_uses import find_uses

read_installed = tree_reader(Path(vllm.__file__).parents[1])
INSTALLED = compat.installed_source()
NEEDED = compat.find_needed(INSTALLED)
PLUGIN = Path(vllm_magicdec.__file__).parent


def test_the_installed_vllm_has_it():
    problems = {needed.label: find_problem(needed, INSTALLED) for needed in NEEDED}
    assert {label: problem for label, problem in problems.items() if problem} == {}


def test_every_import_of_vllm_is_looked_at():
    """By the file's text alone: `from vllm... import ...` anywhere in the plugin."""
    found = {(needed.module, needed.name) for needed in NEEDED}
    for path in PLUGIN.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                if node.module in compat.OPTIONAL:
                    continue
                for alias in node.names:
                    assert (node.module, alias.name) in found, f"{path.name}: {alias.name}"


@pytest.mark.parametrize("needed", CALLED, ids=lambda needed: needed.label)
def test_a_renamed_definition_is_noticed(needed):
    """A check that cannot fail is none: rename what is needed and look again."""
    last = needed.name.split(".")[-1]

    def read_renamed(module: str) -> str | None:
        source = read_installed(module)
        return source and re.sub(rf"\b{last}\b", "renamed", source)

    assert find_problem(needed, Source(read_renamed)) == "missing"


TAKE_ANY = ("CommonAttentionMetadata.replace", "GPUModelRunner.load_model", "get_tokenizer")
NAMED = [n for n in NEEDED if n.parameters and n.name not in TAKE_ANY]


@pytest.mark.parametrize("needed", NAMED, ids=lambda needed: needed.label)
def test_a_parameter_that_is_gone_is_noticed(needed):
    more = replace(needed, parameters=(*needed.parameters, "not_a_parameter"))
    assert find_problem(more, INSTALLED) == "no longer has not_a_parameter"


def test_a_patched_vllm_misses_nothing(tmp_path):
    """The patch that mends CPU attention takes away what the plugin's own mend works with."""
    module = "vllm.v1.attention.backends.cpu_attn"
    copy = tmp_path / (module.replace(".", "/") + ".py")
    copy.parent.mkdir(parents=True)
    copy.write_text(read_installed(module))
    (patch,) = (PLUGIN.parent / "patches" / "vllm-0.32.0").glob("0003-*.patch")
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    patched = Source(lambda name: copy.read_text() if name == module else read_installed(name))
    assert not [needed.label for needed in NEEDED if find_problem(needed, patched)]
    for needed in compat.MENDED:
        assert needed in NEEDED
        assert compat.look_up(needed, patched) == "missing" != compat.look_up(needed, INSTALLED)


def test_a_missing_module_and_a_new_constructor_are_noticed():
    assert find_problem(HOOKED[0], Source(lambda module: None)) == "module missing"
    constructor = next(n for n in HOOKED if n.absent)
    owner = constructor.name.split(".")[0]
    source = Source(lambda module: f"class {owner}:\n    def __new__(cls): ...\n")
    assert find_problem(constructor, source) == "defined by vLLM itself now"


VLLM = {
    "vllm.__init__": "",
    "vllm": "",
    "vllm.engine": """
import typing
if typing.TYPE_CHECKING:
    from vllm.steps import Step as PlainStep
class Config:
    step: "PlainStep | None" = None
    @property
    def limits(self) -> "Limits": ...
class Limits:
    most: int
class Base:
    def __init__(self, config: Config):
        self.config = config
        self.buffers, self.rows = [], 0
    def run(self, step, rows=None): ...
class Engine(Base):
    def ready(self): ...
def build(config, *, device=None) -> Engine: ...
""",
    "vllm.steps": "class Step:\n    tokens: int\n",
}
PLUGIN_FILE = """
from vllm.engine import Config, Engine, build
import vllm.steps as steps
class Ours(Engine):
    def run(self, step, rows=None):
        super().run(step, rows=rows)
        self.mine = self.buffers
        return self.config.step.tokens + self.mine
def make(config: Config):
    most = config.limits.most
    engine = build(config, device="cpu")
    engine.ready()
    return steps.Step, most
"""


def uses_of(tmp_path, modules=VLLM):
    path = tmp_path / "ours.py"
    path.write_text(PLUGIN_FILE)
    return find_uses([path], Source(modules.get))


def test_uses_are_found_through_imports_annotations_and_inheritance(tmp_path):
    assert {f"{use.module}.{use.name}" for use in uses_of(tmp_path)} == {
        "vllm.engine.Config",
        "vllm.engine.Engine",
        "vllm.engine.build",
        "vllm.engine.Engine.run",
        "vllm.engine.Engine.buffers",
        "vllm.engine.Engine.config",
        "vllm.engine.Engine.ready",
        "vllm.engine.Config.step",
        "vllm.engine.Config.limits",
        "vllm.engine.Limits.most",
        "vllm.steps.Step",
        "vllm.steps.Step.tokens",
    }


@pytest.mark.parametrize(
    ("module", "old", "new", "problem"),
    [
        ("vllm.engine", "def build", "def construct", ("build", "missing")),
        ("vllm.engine", "*, device", "*, where", ("build", "no longer has device")),
        ("vllm.engine", "step, rows=None", "step, rows, seed", ("Engine.run", "also passes seed")),
        ("vllm.engine", "step, rows=None", "step", ("Engine.run", "no longer has rows")),
        ("vllm.engine", "self.buffers, self.rows", "self.rows", ("Engine.buffers", "missing")),
        ("vllm.engine", "class Limits", "class Bounds", ("Limits.most", "class Limits missing")),
        ("vllm.engine", "most: int", "top: int", ("Limits.most", "missing")),
        ("vllm.engine", "class Engine(Base)", "class Engine", ("Engine.config", "missing")),
        ("vllm.steps", "tokens", "ids", ("Step.tokens", "missing")),
    ],
)
def test_what_another_version_lacks_is_noticed(tmp_path, module, old, new, problem):
    uses = uses_of(tmp_path)
    assert not [use for use in uses if find_problem(use, Source(VLLM.get))]
    assert old in VLLM[module]
    other = Source({**VLLM, module: VLLM[module].replace(old, new)}.get)
    assert problem in [(use.name, find_problem(use, other)) for use in uses]


def test_other_parameters_of_a_function_are_named_though_all_that_is_needed_is_there():
    other = Source({**VLLM, "vllm.engine": VLLM["vllm.engine"].replace("device=None", "device, pool")}.get)
    build = Needed("vllm.engine", "build", ("config", "device"))
    assert find_problem(build, other) is None
    assert find_change(build, other, Source(VLLM.get)) == "ok (+pool)"
    assert find_change(build, Source(VLLM.get), Source(VLLM.get)) is None
    turned = {**VLLM, "vllm.engine": VLLM["vllm.engine"].replace("config, *, device", "device, config")}
    assert find_change(build, Source(turned.get), Source(VLLM.get)) == "ok (in another order)"


def test_the_report_on_an_unpacked_wheel(tmp_path, monkeypatch, capsys):
    build = Needed("vllm.engine", "build", ("device",))
    monkeypatch.setattr(compat, "find_needed", lambda source: (build,))
    engine = tmp_path / "vllm-9.9" / "vllm" / "engine.py"
    engine.parent.mkdir(parents=True)
    engine.write_text("def build(device): ...\n")
    assert compat.main([str(tmp_path / "vllm-9.9")]) == 0
    engine.write_text("def build(where): ...\n")
    assert compat.main([str(tmp_path / "vllm-9.9")]) == 1
    assert "| `engine: build` | no longer has device |" in capsys.readouterr().out
    assert compat.main([str(tmp_path)]) == 2
