# SPDX-License-Identifier: Apache-2.0
"""The command `magicdec`: planning, measuring and preparing before an engine serves.

`console.py` finds the subcommands. `plan.py` predicts step times, `profile.py` measures them, `index.py`
reads the documents that drafts are looked up in. `performance.py` is the speedup model on a roofline,
`hardware.py` the data sheets that it reads. `magicdec plan` imports neither vLLM nor torch.
Change this room for another device, model or subcommand.
"""
