"""The trainer's side: session, lease, routing, flattening, optimizers, contexts."""
