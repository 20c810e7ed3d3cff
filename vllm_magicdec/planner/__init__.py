# SPDX-License-Identifier: Apache-2.0
"""The command `magicdec`: what speculation would bring here, before an engine serves and without one.

`console.py` finds the subcommands, `plan.py` and `profile.py` are one each. `performance.py` is the speedup
model on a roofline, `hardware.py` the data sheets that it reads. `magicdec plan` imports neither vLLM nor
torch. Change this room for another device, model or subcommand.
"""
