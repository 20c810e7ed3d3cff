# SPDX-License-Identifier: Apache-2.0
"""What a calibration says of one token."""

from vllm_magicdec.lookup.calibration import Calibration


def chance_of(calibration: Calibration, length: int, share: float) -> float:
    """That a token follows so many that matched, in this share of their occurrences."""
    (chance,), _ = calibration.chances(length, [share], 0.0)
    return chance
