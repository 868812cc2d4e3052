"""Rehearsals: real training of a small model by a plan, with TorchRec, to see what a step takes."""
