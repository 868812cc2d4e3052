"""PPO on the game: its settings, the run and its folder, the cost model on the way, the report."""
