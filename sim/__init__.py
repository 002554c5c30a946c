"""The whole cluster in one thread on virtual time, with faults; a failed run is replayed by its seed."""
