"""A job's figures in the trackers that people know: Weights & Biases, MLflow, TensorBoard, trackio.

One follower a job and tracker reads the job's events and writes their figures: on a laptop next to a watch, on the node
in a child process (docs/adr/0016-trackers-follow-events.md). Both use this package, so a run looks the same whoever
wrote it. It needs the standard library only; a tracker's own package is imported when its run is opened.
"""

from horizon_formats.trackers.figures import Ending, Point, TrackedJob, ending_of, point_of
from horizon_formats.trackers.follower import Follower, Target, TrackerFailed, TrackerMissing
from horizon_formats.trackers.known import TRACKERS, is_installed, package_problem

__all__ = [
    "TRACKERS",
    "Ending",
    "Follower",
    "Point",
    "Target",
    "TrackedJob",
    "TrackerFailed",
    "TrackerMissing",
    "ending_of",
    "is_installed",
    "package_problem",
    "point_of",
]
