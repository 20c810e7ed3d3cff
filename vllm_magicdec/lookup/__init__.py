# SPDX-License-Identifier: Apache-2.0
"""Lookups: how a request's text is likely to go on because it did so before, and how likely that is.

`context_index.py` finds where the latest tokens stood before in a request's own context, `calibration.py`
learns how often such a match goes on alike, `lookups.py` is both for all requests of a worker, whose tokens
come as `history.py` says. `datastore.py` finds them in documents that `magicdec index` has read before
(`datastore_files.py`: its files), and `merging.py` chooses among sources.

It knows token ids and nothing else: neither vLLM nor who reads what it finds. Change it for another source.
"""
