# SPDX-License-Identifier: Apache-2.0
"""Lookups: likely continuations of a request's text, from earlier occurrences of its latest tokens.

`context_index.py` searches a request's own context, `datastore.py` documents indexed by `magicdec index`
(files: `datastore_files.py`), `served.py` other answers. `calibration.py` learns how reliable matches are
and chooses among sources, and `lookups.py` does all of it for a worker's requests.
`device_lookups.py` searches on a GPU. Nothing here depends on vLLM.
"""
