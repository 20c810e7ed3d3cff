# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM has everything that the plugin builds on, and the check notices when it has not."""

from pathlib import Path

import pytest
import vllm

from vllm_magicdec.vllm_api.compat import CALLED, HOOKED, NEEDED, Needed, find_problem, tree_reader

read_installed = tree_reader(Path(vllm.__file__).parents[1])


@pytest.mark.parametrize("needed", NEEDED, ids=lambda needed: needed.label)
def test_the_installed_vllm_has_it(needed):
    assert find_problem(needed, read_installed) is None


@pytest.mark.parametrize("needed", CALLED, ids=lambda needed: needed.label)
def test_a_renamed_definition_is_noticed(needed):
    """A check that cannot fail is none: rename what is needed and look again."""
    last = needed.name.split(".")[-1]

    def read_renamed(module: str) -> str | None:
        source = read_installed(module)
        return source and source.replace(f"def {last}(", "def renamed(").replace(
            f"class {last}", "class Renamed"
        )

    assert find_problem(needed, read_renamed) == "missing"


@pytest.mark.parametrize("needed", [n for n in NEEDED if n.parameters], ids=lambda needed: needed.label)
def test_a_parameter_that_is_gone_is_noticed(needed):
    more = Needed(needed.module, needed.name, (*needed.parameters, "not_a_parameter"))
    assert find_problem(more, read_installed) == "no longer has not_a_parameter"


def test_a_missing_module_and_a_new_constructor_are_noticed():
    assert find_problem(HOOKED[0], lambda module: None) == "module missing"
    constructor = next(n for n in HOOKED if n.absent)
    owner = constructor.name.split(".")[0]
    source = f"class {owner}:\n    def __new__(cls): ...\n"
    assert find_problem(constructor, lambda module: source) == "defined by vLLM itself now"
