"""Training: the loop, a step of it, optimisers, the run folder and what a person sees meanwhile."""
