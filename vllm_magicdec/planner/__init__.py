# SPDX-License-Identifier: Apache-2.0
"""The command `magicdec`: what is done before an engine serves.

`console.py` finds the subcommands. `plan.py` and `profile.py` say what speculation would bring here, and
`index.py` reads the documents that drafts are looked up in. `performance.py` is the speedup model on a
roofline, `hardware.py` the data sheets that it reads, `load.py` what a load needs. `simulate.py` serves a
load in simulated time: `traces.py` is who asks, `simulation.py` the engines, `engine_times.py` how long
their steps take. `magicdec plan` imports neither vLLM nor torch.
Change this room for another device, model or subcommand.
"""
