# SPDX-License-Identifier: Apache-2.0
"""Parts of `soak.py`: what is asked, what goes wrong meanwhile, what is watched, and how it is judged."""
