"""Reports on plans: memory, expected step time, causes of the cost, differences of two plans."""
