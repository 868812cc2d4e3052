"""The metrics that `make bench` measures: speed, accuracy and plans, each with its target."""
