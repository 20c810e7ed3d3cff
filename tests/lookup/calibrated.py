# SPDX-License-Identifier: Apache-2.0
"""The probability of one token by a calibration."""

from vllm_magicdec.lookup.calibration import Calibration


def chance_of(calibration: Calibration, length: int, share: float) -> float:
    (chance,), _ = calibration.chances(length, [share], 0.0)
    return chance
