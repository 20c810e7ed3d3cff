# SPDX-License-Identifier: Apache-2.0
"""The command `magicdec`: plan, measure and prepare before an engine serves.

`console.py` runs the subcommands: `plan.py` predicts step times, `profile.py` measures them, `index.py`
builds a datastore for lookups, `train_draft.py` trains a draft. `performance.py` is the speedup model on a
roofline, with the data sheets in `hardware.py`. `magicdec plan` imports neither vLLM nor torch.
Change this package for another device, model or subcommand.
"""
