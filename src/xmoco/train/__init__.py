"""Training: the loop, schedules, checkpoints, the run folder and what a person sees meanwhile."""
