"""Reports on plans: their memory and expected step, why they cost what they do, how two differ."""
