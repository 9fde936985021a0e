"""What several devices do at once, measured with processes of the host device."""

from __future__ import annotations

from horizon_server.codec import from_plain
from horizon_server.planning.rates import PeerRates
from horizon_server.worker.peer_probe import measure_peers


def test_each_device_has_a_process_and_the_slowest_counts() -> None:
    found = measure_peers("host", [], 2, num_elements=1 << 14)
    assert found.num_devices == 2
    for rate in (found.together_bytes_per_s, found.gather_bytes_per_s, found.exchange_bytes_per_s):
        assert 0 < rate < 1e13
    assert from_plain(PeerRates, vars(found)) == found
