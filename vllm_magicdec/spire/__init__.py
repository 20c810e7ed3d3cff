# SPDX-License-Identifier: Apache-2.0
"""SPIRe (arXiv 2504.06419): a draft model that is trained from its target. Pure torch, without vLLM.

- `settings.py`: the shape of a draft, and what its `config.json` says of it
- `model.py`: its mathematics, in training and in serving
- `target.py`: the target's activations and logits; the weights a draft begins with
- `loss.py`, `sequences.py`, `training.py`: MixedLoss, the data's order, the steps
- `serving.py`: which drafts vLLM can serve
- `files.py`, `card.py`: what is written
"""
