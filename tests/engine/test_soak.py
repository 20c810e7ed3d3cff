# SPDX-License-Identifier: Apache-2.0
"""A server under load, bad input, faults and kills: the bounds of `make soak` hold (tests/soak)."""

import pytest
from soak import __main__ as soak


def test_a_server_under_faults_loses_and_changes_no_answer():
    assert soak.show({"traffic": soak.run_traffic(minutes=2, rate=3.5)}), "see the table"


@pytest.mark.extended
def test_killed_servers_leave_nothing_and_can_be_started_again():
    assert soak.show({"kills": soak.run_kills(soak.say)}), "see the table"
