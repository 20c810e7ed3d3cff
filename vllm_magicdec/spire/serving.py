# SPDX-License-Identifier: Apache-2.0
"""Check the configuration of a draft that is to be served."""

from typing import Any

from vllm_magicdec.spire.settings import ARCHITECTURE, SpireError, SpireSettings


def served_settings(hf_config: Any) -> SpireSettings | None:
    """Return the SPIRe settings in a Hugging Face configuration; None if it is no SPIRe draft.

    Raises:
        SpireError: the draft cannot be served.
    """
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
