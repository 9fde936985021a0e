"""Further nodes of a job: machines that give memory and devices to the ranks of jobs of another node's daemon."""
