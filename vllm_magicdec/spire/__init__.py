# SPDX-License-Identifier: Apache-2.0
"""SPIRe (arXiv 2504.06419): a draft model trained from its target, in pure torch without vLLM.

- `settings.py`: the draft's shape and its fields in `config.json`
- `model.py`: the forward pass in training and in serving
- `target.py`: the target's activations and logits; the draft's initial weights
- `loss.py`, `sequences.py`, `training.py`: MixedLoss, the order of the data, the training loop
- `serving.py`: the check of drafts that vLLM serves
- `files.py`, `card.py`: the files of a draft
"""
