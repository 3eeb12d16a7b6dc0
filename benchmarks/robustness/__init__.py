"""Bad clients."""
