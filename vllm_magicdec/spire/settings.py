# SPDX-License-Identifier: Apache-2.0
"""What a SPIRe draft's `config.json` says beside a Llama's fields."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

ARCHITECTURE = "MagicDecSpireForCausalLM"
VERSION = 1


class SpireError(ValueError):
    """What the user named cannot work, in one sentence that says what to do instead."""


@dataclass(frozen=True)
class SpireSettings:
    """The shape of a draft; the switches are the paper's ablations."""

    target: str  # a name, for people
    target_num_hidden_layers: int
    target_layers: tuple[int, ...]  # the block of the target that each of the draft's was pruned from
    sinks: int = 4  # tokens
    window: int = 252  # tokens, the query's own included
    num_draft_steps: int = 4  # forward passes of training, k
    feedback_memory: bool = True  # else a drafted token is seen by its own layer's input
    target_activations: bool = True  # else a verified token's activations are the draft's own
    version: int = VERSION

    @classmethod
    def pruned(
        cls, target: str, num_hidden_layers: int, num_layers: int | None, **fields: Any
    ) -> "SpireSettings":
        """Of a draft that has the last layers of its target.

        Args:
            target: its name.
            num_hidden_layers: of the target.
            num_layers: of the draft; None for a quarter of the target's.
            fields: any others.

        Raises:
            SpireError: the target has no so many layers, or a number is too small.
        """
        num_layers = max(1, (num_hidden_layers + 2) // 4) if num_layers is None else num_layers
        if not 0 < num_layers <= num_hidden_layers:
            raise SpireError(
                f"--layers {num_layers} cannot be taken from a target of {num_hidden_layers}; "
                f"give a number from 1 to {num_hidden_layers}"
            )
        settings = cls(
            target,
            num_hidden_layers,
            tuple(range(num_hidden_layers - num_layers, num_hidden_layers)),
            **fields,
        )
        for name, least in (("sinks", 0), ("window", settings.num_draft_steps), ("num_draft_steps", 1)):
            if getattr(settings, name) < least:
                raise SpireError(f"{name} has to be at least {least}, not {getattr(settings, name)}")
        return settings

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "SpireSettings":
        """What the field `spire` of a `config.json` says.

        Raises:
            SpireError: it is missing, of another version, has other fields or values of other types.
        """
        given = config.get("spire")
        fields = dict(given) if isinstance(given, Mapping) else {}
        if fields.get("version") != VERSION or fields.keys() != cls.__annotations__.keys():
            raise SpireError(
                f"this is no SPIRe draft of version {VERSION}; train one with: magicdec train-draft"
            )
        try:  # as JSON, where a tuple is a list and nothing else is taken for something else
            return TypeAdapter(cls).validate_json(json.dumps(fields), strict=True)
        except (ValidationError, TypeError) as error:
            name, reason = "spire", str(error)
            if isinstance(error, ValidationError):
                problem = error.errors()[0]
                name, reason = ".".join(map(str, ("spire", *problem["loc"]))), problem["msg"]
            raise SpireError(
                f"config.json's field {name} is damaged ({reason}); write it again with: "
                "magicdec train-draft"
            ) from None

    @property
    def num_layers(self) -> int:
        """Of the draft."""
        return len(self.target_layers)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's activations that stand in for a verified token's: the residual stream after so many
        blocks, in vLLM's numbers of auxiliary hidden states."""
        return (*self.target_layers, self.target_layers[-1] + 1)

    def config_fields(self) -> dict[str, Any]:
        """What `config.json` has beside a Llama's fields."""
        spire = {**asdict(self), "target_layers": list(self.target_layers)}
        return {"eagle_aux_hidden_state_layer_ids": list(self.aux_layers), "spire": spire}
