"""What one step computes: consistency, versions of weights, optimizers, losses, and the sequential reference."""
