# SPDX-License-Identifier: Apache-2.0
"""SPIRe's own fields in a draft's `config.json`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

ARCHITECTURE = "MagicDecSpireForCausalLM"
VERSION = 1


class SpireError(ValueError):
    """An error in the user's input: one sentence that says what to do instead."""


@dataclass(frozen=True)
class SpireSettings:
    """The shape of a draft."""

    target: str  # name of the target, for the reader
    target_num_hidden_layers: int
    target_layers: tuple[int, ...]  # for each draft block, the target's block it was pruned from
    sinks: int = 4  # tokens
    window: int = 252  # tokens, including the query's own
    num_draft_steps: int = 4  # k, forward passes in training
    feedback_memory: bool = True  # False: a token's memory for a block is the block's input
    version: int = VERSION

    @classmethod
    def pruned(
        cls, target: str, num_hidden_layers: int, num_layers: int | None, **fields: Any
    ) -> "SpireSettings":
        """Return the settings of a draft with the last layers of its target, a quarter if None is given.

        Raises:
            SpireError: a number is out of range.
        """
        num_layers = max(1, (num_hidden_layers + 2) // 4) if num_layers is None else num_layers
        if not 0 < num_layers <= num_hidden_layers:
            raise SpireError(
                f"--layers {num_layers} cannot be taken from a target of {num_hidden_layers}; "
                f"give a number from 1 to {num_hidden_layers}"
            )
        taken = tuple(range(num_hidden_layers - num_layers, num_hidden_layers))
        settings = cls(target, num_hidden_layers, taken, **fields)
        for name, least in (("sinks", 0), ("window", settings.num_draft_steps), ("num_draft_steps", 1)):
            if getattr(settings, name) < least:
                raise SpireError(f"{name} has to be at least {least}, not {getattr(settings, name)}")
        return settings

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "SpireSettings":
        """Read the field `spire` of a `config.json`.

        Raises:
            SpireError: it is missing, of another version, or invalid.
        """
        given = config.get("spire")
        fields = dict(given) if isinstance(given, Mapping) else {}
        is_served = fields.pop("target_activations", True) is True  # until 0.3 an option of training
        is_version = fields.get("version") == VERSION and fields.keys() == cls.__annotations__.keys()
        if not is_served or not is_version:
            raise SpireError(
                f"this is no SPIRe draft of version {VERSION}; train one with: magicdec train-draft"
            )
        try:  # strict validation accepts a list for a tuple only in JSON
            return TypeAdapter(cls).validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(map(str, ("spire", *problem["loc"])))
            raise SpireError(
                f"config.json's field {name} is damaged ({problem['msg']}); write it again with: "
                "magicdec train-draft"
            ) from None

    @property
    def num_layers(self) -> int:
        """Number of layers of the draft."""
        return len(self.target_layers)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target activations of a verified token: the residual stream after this many blocks.

        vLLM numbers auxiliary hidden states in the same way.
        """
        return (*self.target_layers, self.target_layers[-1] + 1)

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of `config.json` that a Llama's does not have."""
        spire = {**asdict(self), "target_layers": list(self.target_layers)}
        return {"eagle_aux_hidden_state_layer_ids": list(self.aux_layers), "spire": spire}


def served_settings(hf_config: Any) -> SpireSettings | None:
    """Return the SPIRe settings of a Hugging Face configuration, None without any, or raise SpireError."""
    if ARCHITECTURE not in (getattr(hf_config, "architectures", None) or ()):
        return None
    settings = SpireSettings.of({"spire": getattr(hf_config, "spire", None)})
    taken = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None)
    num_layers, last = hf_config.num_hidden_layers, settings.target_num_hidden_layers
    is_consistent = (
        0 < num_layers == settings.num_layers
        and taken == list(settings.aux_layers) == sorted(set(settings.aux_layers))
        and settings.aux_layers[0] >= 0
        and settings.aux_layers[-1] <= last
        and settings.sinks >= 0
        and settings.window > 0
    )
    if not is_consistent:
        raise SpireError(
            f"config.json contradicts itself: {num_layers} layers, pruned from the target's "
            f"{list(settings.target_layers)}, with its activations after {taken} of {last} blocks, "
            f"{settings.sinks} sinks and a window of {settings.window}; write it again with: "
            "magicdec train-draft"
        )
    return settings
