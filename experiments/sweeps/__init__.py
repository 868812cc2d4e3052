"""Many trainings at once by Ray Tune: search space, trials, and what MLflow holds of them."""
