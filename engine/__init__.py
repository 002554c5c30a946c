"""One step of a model: sequences, block pool, scheduler, plan to tensors, paged KV, models, sampler."""
