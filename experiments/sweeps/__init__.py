"""Many trainings at once, by Ray Tune: the space, trials, what is logged and what is found."""
