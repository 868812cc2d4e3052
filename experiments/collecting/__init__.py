"""Collection of training data for cost models: pacing of measurements, proposed shards."""
