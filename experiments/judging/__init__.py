"""Which sharder is better, and how sure that is: tasks, plans, what they cost, scores, verdict."""
