"""Random failures of processes, disks, clocks, locks and networks while commands run."""
