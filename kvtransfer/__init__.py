"""Moving blocks between pools: hand-off tables, manifests, transports. Never knows the engine."""
