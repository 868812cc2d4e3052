"""What is told of plans: their memory by part, why they cost what they do, how two differ."""
