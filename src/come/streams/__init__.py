"""Many streams that share one model: one call of the model for all of them."""
