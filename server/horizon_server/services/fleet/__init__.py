"""Whole jobs on other machines of the fleet, whose daemons have queues of their own."""
