# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profiles; importing this module loads one, in pytest and in separate programs."""

import os

from hypothesis import HealthCheck, settings

# The same cases every time and no deadline, so that neither a rare case nor a stalling machine fails an
# unrelated change.
settings.register_profile(
    "known cases",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# Not based on the profile that hypothesis loads in CI, which resembles the one above.
settings.register_profile("other cases", settings.get_profile("default"), deadline=None)
settings.load_profile("other cases" if "MAGICDEC_TEST_RANDOM" in os.environ else "known cases")
