"""`hma`: launch, inspect and verify disaggregated serving of hybrid-attention models."""
