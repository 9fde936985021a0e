"""`kill -9` of the daemon, of workers and of other children at any moment, with nobody there to help: nothing
acknowledged is lost or done twice, and the weights are those of a run that nothing disturbed.

HORIZON_KILLS is the number of trials (`make test-all` has 300), HORIZON_KILLS_SEED what they are drawn from.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.trials import KillScene, Reference, Trial

pytestmark = pytest.mark.timeout(900)

NUM_TRIALS = int(os.environ.get("HORIZON_KILLS", "5"))
SEED = int(os.environ.get("HORIZON_KILLS_SEED", "10"))


@pytest.mark.parametrize("trial", [Trial.of(SEED, number) for number in range(NUM_TRIALS)], ids=lambda trial: trial.id)
def test_a_kill_costs_nothing_that_was_acknowledged(trial: Trial, reference: Reference, tmp_path: Path) -> None:
    scene = KillScene(trial, reference, tmp_path, tmp_path / "tmp")
    with scene.reported():
        scene.play()
        print(f"{trial.id}: {'killed' if scene.hit else 'came too late'}")
        scene.require_all_is_well()
