"""What costs are learned from: in which order shards are measured, and which are proposed."""
