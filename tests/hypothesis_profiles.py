# SPDX-License-Identifier: Apache-2.0
"""Which cases property tests draw: this module's import decides, in pytest and in programs of their own."""

import os

from hypothesis import HealthCheck, settings

# The same cases every time, as long as they take: neither a rare one nor a machine that stalls is to stop a
# change that has nothing to do with it.
settings.register_profile(
    "known cases",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# Not on top of the profile that hypothesis loads where CI runs, which is like the one above.
settings.register_profile("other cases", settings.get_profile("default"), deadline=None)
settings.load_profile("other cases" if "MAGICDEC_TEST_RANDOM" in os.environ else "known cases")
