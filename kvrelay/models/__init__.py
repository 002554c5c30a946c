"""Models on disk: what there is to pull, where it lies, what its directory says. Knows no torch and no engine."""
