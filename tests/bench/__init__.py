"""What `make bench` measures: the figures that we tell of ourselves, each with its goal."""
