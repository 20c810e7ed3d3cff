# SPDX-License-Identifier: Apache-2.0
"""SPIRe (arXiv 2504.06419): a draft model trained from its target, in pure torch without vLLM.

- `settings.py`: the draft's shape, its fields in `config.json`, and their check before vLLM serves it
- `model.py`: the forward pass in training and in serving
- `target.py`: the target's activations and logits; the draft's initial weights
- `sequences.py`, `training.py`: the order of the data; MixedLoss and the training loop
- `files.py`: the files of a draft
"""
